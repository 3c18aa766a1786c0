"""Images: equal content gives equal bytes; owners, times and order have no effect."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest
from harness.kube import c_compiler, host_image
from harness.kube.image import Entry, Image, tree, write_archive
from harness.kube.python_image import closure, linked

IMAGE = Image("localhost/probe:7", ["/bin/probe"], {"B": "2", "A": "1"})


def blobs(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as found:
        files = {member.name: found.extractfile(member) for member in found.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def described(content: dict[str, bytes], digest: str) -> Any:
    blob = content[f"blobs/{digest.replace(':', '/')}"]
    assert digest == f"sha256:{hashlib.sha256(blob).hexdigest()}"
    return blob


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "content"
    (made / "bin").mkdir(parents=True)
    (made / "bin" / "probe").write_text("run me")
    (made / "bin" / "probe").chmod(0o700)
    (made / "text").write_text("read me")
    (made / "text").chmod(0o600)
    (made / "link").symlink_to("text")
    return made


def test_an_archive_matches_its_manifest_and_configuration(folder: Path, tmp_path: Path) -> None:
    digest = write_archive(tmp_path / "out.tar", IMAGE, [tree(folder), [Entry("tmp", 0o1777)]])
    content = blobs(tmp_path / "out.tar")
    index = json.loads(content["index.json"])
    assert index["manifests"][0]["digest"] == digest
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "localhost/probe:7"
    manifest = json.loads(described(content, digest))
    config = json.loads(described(content, manifest["config"]["digest"]))
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    assert config["config"]["User"] == "65532:65532"
    layers = [described(content, layer["digest"]) for layer in manifest["layers"]]
    assert [len(layer) for layer in layers] == [layer["size"] for layer in manifest["layers"]]
    with tarfile.open(fileobj=io.BytesIO(layers[0])) as layer:
        seen = {one.name: one for one in layer.getmembers()}
    assert list(seen) == sorted(seen)
    assert {(one.uid, one.gid, one.mtime, one.uname) for one in seen.values()} == {(0, 0, 0, "")}
    assert (seen["bin/probe"].mode, seen["text"].mode) == (0o755, 0o644)
    assert seen["link"].linkname == "text"


def test_the_same_content_is_the_same_image(folder: Path, tmp_path: Path) -> None:
    first = write_archive(tmp_path / "1.tar", IMAGE, [tree(folder)])
    os.utime(folder / "text", (1, 1))
    again = write_archive(tmp_path / "2.tar", IMAGE, [reversed(tree(folder))])
    assert first == again
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    (folder / "text").write_text("read me!")
    assert write_archive(tmp_path / "3.tar", IMAGE, [tree(folder)]) != first
    assert not list(tmp_path.glob("image-*"))


def test_equal_layers_are_one_blob(folder: Path, tmp_path: Path) -> None:
    write_archive(tmp_path / "out.tar", IMAGE, [tree(folder), tree(folder)])
    with tarfile.open(tmp_path / "out.tar") as archive:
        names = archive.getnames()
    assert len(names) == len(set(names)) == 5


def test_only_outermost_folders_are_bound(tmp_path: Path) -> None:
    one, other = tmp_path / "checkout", tmp_path / "checkout-too"
    assert host_image.outermost([one / ".venv", other, one, one]) == [one, other]
    bound = host_image.folders([tmp_path])
    assert tmp_path in bound
    assert not any(path != tmp_path and tmp_path in path.parents for path in bound)


def test_the_host_image_has_a_place_for_each_folder() -> None:
    mount = Path("/srv/models/tiny")
    seen = {entry.path: entry for entry in host_image.entries([mount])}
    for path in (mount, *mount.parents[:-1]):
        assert seen[str(path).lstrip("/")].mode == 0o755
    assert seen["tmp"].mode == 0o1777
    assert b"65532" in (seen["etc/passwd"].data or b"")
    assert "" not in seen


def test_the_closure_of_a_package_is_what_it_imports() -> None:
    found = closure("kvferry", ["serve"])
    assert {"kvferry", "torch", "grpcio", "typing-extensions"} <= found.keys()
    assert not {"pytest", "kopf", "mypy"} & found.keys()


def test_libraries_are_found_as_the_loader_finds_them() -> None:
    assert any(path.name.startswith("libc.so") for path in linked([Path("/bin/sh").resolve()]))


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("gcc") is None, reason="chroot needs root, and gcc")
def test_the_staged_compiler_builds_an_extension_module_by_itself(tmp_path: Path) -> None:
    c_compiler.stage(tmp_path, linked)
    include = Path(sysconfig.get_path("include"))
    shutil.copytree(include, tmp_path / "include")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "probe.c").write_text(
        "#include <Python.h>\n#include <dlfcn.h>\n#include <stdbool.h>\n"
        'static struct PyModuleDef probe = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, NULL};\n'
        "PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&probe); }\n"
    )
    command = ["gcc", "probe.c", "-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", "probe.so", "-I/include"]
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    subprocess.run(["chroot", tmp_path, *command], env=path, check=True, timeout=60)
    loaded = subprocess.run(
        [sys.executable, "-c", "import probe; print(probe.__name__)"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert loaded.stdout == "probe\n"
