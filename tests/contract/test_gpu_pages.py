"""What the pages say of GPUs agrees with the rows of `gpu.csv`."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = list(csv.DictReader((ROOT / "tests/bench/results/gpu.csv").read_text("utf-8").splitlines()))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/adr").glob("*.md"))]
SUBJECTS = {
    "add_rms_norm": r"RMSNorm|residual",
    "copy_blocks": r"copies of blocks",
    "decode_attention": r"decode attention|paged attention",
    "decode_fp8": r"fp8",
    "decode_int8": r"int8",
    "decode_step": r"captur|CudaGraphs|steps? (with|of)|workers? on GPUs?",
    "decode_step_host": r"the host's part",
    "digest_blocks": r"digest",
    "embedding": r"embedding",
    "gather_blocks": r"gather|staging",
    "gather_rows": r"gather",
    "latent_decode": r"latent|absorbed",
    "log_probabilities": r"log-probabilities",
    "place_qkv": r"place_qkv",
    "prefill_attention": r"prefill attention",
    "sample": r"sampling|draws",
    "scatter_blocks": r"scatter",
    "silu_mul": r"SiLU",
}
"""Words of a sentence about each measured operation."""
_DENIAL = re.compile(
    r"\bnot (been |yet )?measured|\bunmeasured|\b(not|never) run\b|and not on a GPU|no GPU was available",
    re.IGNORECASE,
)
_ABOUT_GPUS = re.compile(r"\bGPUs?\b|Triton|CUDA|CudaGraphs")


def sentences(text: str) -> list[str]:
    """Return the sentences and headings of a page, each in one line."""
    blocks = re.split(r"\n\s*\n|\n(?=[#|*-])", text)
    return [" ".join(part.split()) for block in blocks for part in re.split(r"(?<=[.:!?])\s+(?=[A-Z`#*\[])", block)]


def denials(text: str) -> list[str]:
    """Return the sentences that say of something measured on a GPU, or of GPUs as a whole, that it was not."""
    found = []
    for sentence in sentences(text):
        if _DENIAL.search(sentence) and _ABOUT_GPUS.search(sentence):
            subjects = [name for name, words in SUBJECTS.items() if re.search(words, sentence, re.IGNORECASE)]
            if subjects or re.search(r"anything on a GPU|[Ww]orkers on GPUs|Triton is tested", sentence):
                found.append(sentence)
    return found


def test_each_measured_operation_has_words() -> None:
    assert {row["op"].split()[0] for row in ROWS} == set(SUBJECTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_denies_a_measurement(page: Path) -> None:
    assert denials(page.read_text("utf-8")) == []


def test_the_readme_and_the_page_name_the_measured_gpus() -> None:
    gpus = {re.sub(r"^NVIDIA (\w+).*", r"\1", row["gpu"]) for row in ROWS}
    for page in (ROOT / "README.md", ROOT / "docs/gpus.md", ROOT / "docs/performance.md"):
        named = set(re.findall(r"\b[AHBL]\d{2,3}\b", page.read_text("utf-8")))
        assert gpus <= named, f"{page.name} does not name {gpus - named}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[Workers on GPUs](docs/gpus.md) are tested, but\n[not measured yet](docs/adr/18.md).", 1),
        ("The kernels of latent vectors were compiled for GPUs and have not run on a GPU.", 1),
        ("## What is not measured: anything on a GPU", 1),
        ("TLS was not measured.", 0),
        ("`--max-chunk-tokens` has fewer launches; its effect on a GPU was not measured.", 0),
    ],
)
def test_denials_are_found(text: str, count: int) -> None:
    assert len(denials(text)) == count
