"""Names of models on the Hugging Face Hub: `[hf://]ORG/NAME[:QUANTIZATION][@REVISION]`. Pure."""

import re
from dataclasses import dataclass, replace

from kvferry.core.errors import UsageError, shortened

SCHEME = "hf://"
"""Prefix with which a name never means a local folder."""
FORM = "ORG/NAME[:QUANTIZATION][@REVISION]"
# The rules of the hub: up to 96 letters, digits, `-`, `_` and `.`; the first and the last are neither `-` nor `.`.
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_QUANTIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.+/-]{0,198}[A-Za-z0-9_+])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """Which files of which repository at which revision."""

    repo: str
    """`ORG/NAME`."""
    quantization: str = ""
    """Quantization of the GGUF file, for example `Q4_K_M`; empty for safetensors, or for the only GGUF file."""
    revision: str = ""
    """Branch, tag or commit; empty for the default branch."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.given}"

    @property
    def given(self) -> str:
        """The name as in commands: with the revision, without `hf://`."""
        return f"{self.served}@{self.revision}" if self.revision else self.served

    @property
    def served(self) -> str:
        """Name of the model for clients: without the revision."""
        return f"{self.repo}:{self.quantization}" if self.quantization else self.repo

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a whole commit, which never means other files."""
        return is_commit(self.revision)

    def pinned(self, commit: str) -> "HubName":
        """Return this name at a commit."""
        return replace(self, revision=commit)


def is_commit(revision: str) -> bool:
    """Return whether a revision is a whole commit, 40 hex digits."""
    return _COMMIT.fullmatch(revision) is not None


def is_repo(text: str) -> bool:
    """Return whether a text is `ORG/NAME` by the hub's rules."""
    org, slash, name = text.partition("/")
    return (
        slash == "/"
        and all(_PART.fullmatch(part) is not None for part in (org, name))
        and "--" not in text
        and ".." not in text
        and not name.endswith(".git")
    )


def parse_hub_name(spec: str) -> HubName | None:
    """Read a model's name; return `None` if it is not one of the hub, but a path or another name.

    A name that ends in `.gguf` is a path, unless it begins with `hf://`.

    Raises:
        UsageError: the quantization or the revision is invalid, or the name begins with `hf://` and is none.
    """
    is_explicit = spec.startswith(SCHEME)
    head, at, revision = spec.removeprefix(SCHEME).partition("@")
    repo, colon, quantization = head.partition(":")
    if not is_repo(repo) or (repo.endswith(".gguf") and not is_explicit):
        if is_explicit:
            raise UsageError(
                f"model {shortened(spec)!r}: {shortened(repo)!r} is not ORG/NAME on the Hugging Face Hub: two parts of "
                f"letters, digits, - _ and . with one slash; use {SCHEME}{FORM}",
                field="model",
            )
        return None
    if colon and _QUANTIZATION.fullmatch(quantization) is None:
        raise UsageError(
            f"model {shortened(spec)!r}: {shortened(quantization)!r} is not a quantization such as Q4_K_M; use {FORM}",
            field="model",
        )
    if at and (_REVISION.fullmatch(revision) is None or ".." in revision or "//" in revision):
        raise UsageError(
            f"model {shortened(spec)!r}: {shortened(revision)!r} is not a branch, a tag or a commit; use {FORM}",
            field="model",
        )
    return HubName(repo, quantization, revision)
