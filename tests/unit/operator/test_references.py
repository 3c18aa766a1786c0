"""Texts of a pool reach the processes of its pods as they are: the kubelet replaces no variables in them."""

import re
from typing import Any

from unit.operator.pools import made_of, pool

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
"""What the kubelet replaces in arguments and variables: `$$` by `$`, and references to variables."""
HOSTILE = "/models/$(TIER_0_URL)/$$(HOME)"


def expanded(text: str) -> str:
    """Return a text as the kubelet passes it to a process, with each reference to a variable as `<NAME>`."""
    return _REFERENCE.sub(lambda found: "$" if found[1] is None else f"<{found[1]}>", text)


def arguments_of(made: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    found = {}
    for name, one in made.items():
        if one.get("kind") == "Deployment":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            values = [each["value"] for each in container["env"] if "value" in each]
            found[name] = [expanded(text) for text in (*container["args"], *values)]
    return found


def test_references_in_texts_of_a_pool_are_not_replaced() -> None:
    tiers = [
        {"type": "redis", "urlSecret": {"name": "s", "key": "k"}},
        {"type": "redis", "url": "redis://cache/$(POD_IP)"},
    ]
    made = pool(model={"name": "m", "source": HOSTILE, "toolCallParser": "$(HOME)"}, tiers=tiers)
    found = arguments_of(made_of(made))
    assert len(found) == 3
    for name, texts in found.items():
        assert f"--model={HOSTILE}" in texts, name
        assert "--tool-call-parser=$(HOME)" in texts, name
    workers = {name: texts for name, texts in found.items() if "gateway" not in name}
    assert len(workers) == 2
    for texts in workers.values():
        assert {"--advertise-host=<POD_IP>", "--worker-id=<POD_NAME>"} <= set(texts)
        assert "<TIER_0_URL>,redis://cache/$(POD_IP)" in texts
        assert sum("<" in text for text in texts) == 3
