"""Writes OCI images as archives, without a daemon and reproducibly: equal content results in equal bytes."""

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

NONROOT = 65532
"""User id of kvferry's images."""

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a layer: a file if it has a source or data, a link if it has a target, otherwise a folder."""

    path: str
    """Path in the image, without a leading slash."""
    mode: int = 0o755
    source: Path | None = None
    data: bytes | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """Name and configuration of an image."""

    name: str
    """Image name with tag."""
    entrypoint: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    user: str = f"{NONROOT}:{NONROOT}"
    workdir: str = "/"
    labels: dict[str, str] = field(default_factory=dict)


def file_entry(path: str, source: Path) -> Entry:
    """Create an entry for a file of this machine; only the executable bit of its mode is kept."""
    return Entry(path, 0o755 if os.access(source, os.X_OK) else 0o644, source=source)


def tree(folder: Path, at: str = "") -> list[Entry]:
    """Return the entries for all files in a folder; in the image, the folder is at `at`."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = f"{at}/{path.relative_to(folder)}".lstrip("/")
        if path.is_symlink():
            found.append(Entry(name, target=os.readlink(path)))
        elif path.is_dir():
            found.append(Entry(name))
        elif path.is_file():
            found.append(file_entry(name, path))
    return found


def write_archive(out: Path, image: Image, layers: Sequence[Iterable[Entry]]) -> str:
    """Write the archive atomically and return the digest of its manifest."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix="image-") as scratch:
        written = [_write_layer(entries, Path(scratch) / str(at)) for at, entries in enumerate(layers)]
        config = _json(_config(image, [digest for _, digest in written]))
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": _described(_CONFIG, config),
                "layers": [
                    {"mediaType": _LAYER, "digest": digest, "size": path.stat().st_size} for path, digest in written
                ],
            }
        )
        names = {
            "io.containerd.image.name": image.name,
            "org.opencontainers.image.ref.name": image.name.rpartition(":")[2],
        }
        index = _json({"schemaVersion": 2, "manifests": [{**_described(_MANIFEST, manifest), "annotations": names}]})
        fresh = Path(scratch) / "archive"
        with tarfile.open(fresh, "w", format=tarfile.GNU_FORMAT) as archive:
            _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            _add(archive, "index.json", index)
            for blob in (config, manifest):
                _add(archive, _blob_path(_digest(blob)), blob)
            for path, digest in _distinct(written):
                info = tarfile.TarInfo(_blob_path(digest))
                info.size = path.stat().st_size
                with path.open("rb") as file:
                    archive.addfile(info, file)
        os.replace(fresh, out)
    return _digest(manifest)


def _distinct(written: Iterable[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Return each digest once, since layers with equal digests are the same blob."""
    return [(path, digest) for digest, path in {digest: path for path, digest in written}.items()]


def _config(image: Image, layers: list[str]) -> dict[str, object]:
    return {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": layers},
        "config": {
            "Entrypoint": list(image.entrypoint),
            "Env": [f"{name}={value}" for name, value in image.env.items()],
            "User": image.user,
            "WorkingDir": image.workdir,
            "Labels": image.labels,
        },
    }


class _Hashing(io.RawIOBase):
    """Writer that forwards data and computes its digest."""

    def __init__(self, to: IO[bytes]) -> None:
        self._to = to
        self.sum = hashlib.sha256()

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        self.sum.update(data)
        return self._to.write(data)


def _write_layer(entries: Iterable[Entry], path: Path) -> tuple[Path, str]:
    with path.open("wb") as file:
        out = _Hashing(file)
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as layer:
            for entry in sorted(entries, key=lambda one: one.path):
                _add_entry(layer, entry)
    return path, f"sha256:{out.sum.hexdigest()}"


def _add_entry(layer: tarfile.TarFile, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.path)  # owner root, time 0: reproducible
    info.mode = entry.mode
    if entry.target is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
        layer.addfile(info)
    elif entry.data is not None:
        info.size = len(entry.data)
        layer.addfile(info, io.BytesIO(entry.data))
    elif entry.source is not None:
        with entry.source.open("rb") as file:
            info.size = os.fstat(file.fileno()).st_size
            layer.addfile(info, file)
    else:
        info.type = tarfile.DIRTYPE
        layer.addfile(info)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _described(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
