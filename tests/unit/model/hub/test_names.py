"""Names of the hub are told from paths, and invalid parts are refused."""

import pytest

from kvferry.core.errors import UsageError
from kvferry.model.hub.names import HubName, parse_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("hf://Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("a/b@main", HubName("a/b", revision="main")),
        ("a/b@refs/pr/3", HubName("a/b", revision="refs/pr/3")),
        (f"a/b@{COMMIT}", HubName("a/b", revision=COMMIT)),
        ("a/b-GGUF:Q4_K_M", HubName("a/b-GGUF", "Q4_K_M")),
        ("a/b-GGUF:UD-Q4_K_XL@v1.0", HubName("a/b-GGUF", "UD-Q4_K_XL", "v1.0")),
        ("hf://a/b.gguf", HubName("a/b.gguf")),
        (f"{'a' * 96}/{'b' * 96}", HubName(f"{'a' * 96}/{'b' * 96}")),
    ],
)
def test_a_name_has_three_parts(spec: str, name: HubName) -> None:
    assert parse_hub_name(spec) == name
    assert parse_hub_name(str(name)) == name
    assert parse_hub_name(name.given) == (None if name.repo.endswith(".gguf") else name)


@pytest.mark.parametrize(
    "spec",
    [
        "", "tiny", "smollm2-135m-instruct", "./models/x", "/models/x", "models/x/", "../x", "a/b/c", "~/x", "a//b",
        "a/../b", "models/x.gguf", "-a/b", "a/-b", "a/b.", ".a/b", "a/b--c", "a/b..c", "a/b.git", "a b/c", "a/b c",
        "ä/b", "a/b\n", "a\\b/c", f"{'a' * 97}/b", f"a/{'b' * 97}", "datasets/a/b", "a/b#c", "a/b?c", "a/%2e", "/b",
    ],
)  # fmt: skip
def test_a_path_is_no_name(spec: str) -> None:
    assert parse_hub_name(spec) is None


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("a/b:", "'' is not a quantization"),
        ("a/b:Q4 K", "'Q4 K' is not a quantization"),
        ("a/b:../x", "'../x' is not a quantization"),
        ("a/b@", "'' is not a branch"),
        ("a/b@v1:Q4_K_M", "'v1:Q4_K_M' is not a branch"),
        ("a/b@a/../b", "'a/../b' is not a branch"),
        ("a/b@/x", "'/x' is not a branch"),
        (f"a/b@{'x' * 300}", "is not a branch"),
        ("hf://a", "'a' is not ORG/NAME"),
        ("hf:///etc/passwd", "is not ORG/NAME"),
        ("hf://models/a/b", "'models/a/b' is not ORG/NAME"),
    ],
)
def test_an_invalid_part_is_refused_with_the_form(spec: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hub_name(spec)
    assert told in caught.value.message
    assert "ORG/NAME[:QUANTIZATION][@REVISION]" in caught.value.message
    assert caught.value.field == "model"


def test_the_name_for_clients_has_no_revision() -> None:
    name = HubName("a/b", "Q8_0", "main")
    assert (name.served, name.given, str(name)) == ("a/b:Q8_0", "a/b:Q8_0@main", "hf://a/b:Q8_0@main")
    assert not name.is_pinned
    assert name.pinned(COMMIT).is_pinned
