"""The packed chart has the same bytes each time, and its OCI layout names each blob by its digest."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

from harness.release.__main__ import absolute_links
from harness.release.chart import layout, package

CHART = {"name": "demo", "version": "0.1.0", "home": "https://example.org/demo"}


def _chart(folder: Path) -> Path:
    (folder / "demo/templates").mkdir(parents=True)
    (folder / "demo/Chart.yaml").write_text("name: demo\nversion: 0.1.0\n")
    (folder / "demo/templates/a.yaml").write_text("kind: A\n")
    return folder / "demo"


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    packed = package(_chart(tmp_path / "a"), 1_000_000_000)
    assert packed == package(_chart(tmp_path / "b"), 1_000_000_000)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == ["demo/Chart.yaml", "demo/templates/a.yaml"]


def test_blobs_of_the_layout_have_the_digests_that_its_manifest_names(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(layout(CHART, package(_chart(tmp_path), 0), 0))) as archive:
        files = {name: archive.extractfile(name).read() for name in archive.getnames()}
    [entry] = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(files["blobs/" + entry["digest"].replace(":", "/")])
    for blob in (entry, manifest["config"], *manifest["layers"]):
        data = files["blobs/" + blob["digest"].replace(":", "/")]
        assert len(data) == blob["size"]
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == blob["digest"]


def test_relative_links_become_links_to_the_released_files() -> None:
    text = "[a](docs/a.md#b) [c](https://x.org/) [d](#here)"
    assert absolute_links(text, "https://h.org/r", "0.1.0") == (
        "[a](https://h.org/r/blob/v0.1.0/docs/a.md#b) [c](https://x.org/) [d](#here)"
    )
