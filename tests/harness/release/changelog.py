"""Folds the fragments of docs/changes into the section of a version in CHANGELOG.md."""

import re
from dataclasses import dataclass

AREAS = ("Gateway and API", "Engine", "KV and hand-off", "Kubernetes", "Models", "Tools")
KINDS = ("added", "changed", "fixed", "removed")
_WORDS = {
    "Kubernetes": r"pools?|chart|operator|pods?|cluster|Helm|kubelet|HPA|InferencePool|NetworkPolic",
    "KV and hand-off": r"hand-offs?|tiers?|connectors?|NIXL|tickets?|KV",
    "Models": r"models?|GGUF|safetensors|checkpoints?|weights|hub|families|family",
    "Engine": r"engine|kernels?|GPUs?|steps?|LLM|scheduler|adapters?|workers?|speculation|samples?",
    "Tools": r"`kvferry (?:bench|simulate|plan|tune|chat|completion|explain|model|up)\b|make|CLI|command line|docs",
}
"""Words by which an entry belongs to an area; the first area with most words wins; without any: the gateway."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """One change that a user notices."""

    name: str
    kind: str
    text: str


def parse(name: str, text: str) -> Fragment:
    """Read a fragment named `TOPIC.KIND.md`.

    Raises:
        ValueError: the name has another form.
    """
    found = re.fullmatch(rf"[a-z0-9_-]+\.({'|'.join(KINDS)})\.md", name)
    if found is None:
        raise ValueError(f"docs/changes/{name}: the name must be TOPIC.KIND.md, with a KIND of {', '.join(KINDS)}")
    from_the_root = text.replace("](../", "](docs/")  # CHANGELOG.md is above docs
    return Fragment(name, found[1], " ".join(from_the_root.split()))


def area_of(text: str) -> str:
    """Return the area of an entry by its words."""
    counts = {area: len(re.findall(rf"(?<!\w)(?:{words})", text, re.IGNORECASE)) for area, words in _WORDS.items()}
    most = max(counts.values())
    return next(area for area in counts if counts[area] == most) if most else AREAS[0]


def fold(changelog: str, fragments: list[Fragment], version: str, date: str) -> str:
    """Return the changelog with a dated section of the version.

    Before the first release nobody had what was changed, fixed or removed, so that the first section takes only
    what was added; later sections take all, and name the kind of what was not added.

    Raises:
        ValueError: the changelog has a section of this version already, with a date.
    """
    head, *pages = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    if any(re.match(rf"## {re.escape(version)} \(\d", page) for page in pages):
        raise ValueError(f"CHANGELOG.md: version {version} has a date already; raise the version in pyproject.toml")
    is_first = not any(re.match(r"## \S+ \(\d", page) for page in pages)
    open_page = pages.pop(0) if pages and pages[0].startswith(f"## {version} (unreleased)") else ""
    entries = {area: _entries(open_page, area) for area in AREAS}
    for one in sorted(fragments, key=lambda f: (KINDS.index(f.kind), f.name)):
        if is_first and one.kind != "added":
            continue
        text = one.text if one.kind == "added" else f"{one.kind.capitalize()}: {one.text}"
        entries[area_of(one.text)].append(_wrapped(text))
    page = [f"## {version} ({date})"]
    for area in AREAS:
        page += [f"### {area}", "\n".join(entries[area])] if entries[area] else [f"### {area}"]
    return head + "\n\n".join(page) + "\n" + "".join(f"\n{rest}" for rest in pages)


def section(changelog: str, version: str) -> str:
    """Return the text of a version's section, without its heading, for the page of a release.

    Raises:
        ValueError: there is no such section.
    """
    for page in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        if page.startswith(f"{version} ("):
            return page.partition("\n")[2].strip() + "\n"
    raise ValueError(f"CHANGELOG.md has no section of version {version}")


def _entries(page: str, area: str) -> list[str]:
    found = re.search(rf"^### {re.escape(area)}\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL)
    return [f"- {entry.strip()}" for entry in re.split(r"^- ", found[1], flags=re.MULTILINE)[1:]] if found else []


def _wrapped(text: str) -> str:
    lines, line = [], "-"
    for word in text.split():
        if len(line) + 1 + len(word) > 120:
            lines.append(line)
            line = " "
        line += f" {word}"
    return "\n".join([*lines, line])
