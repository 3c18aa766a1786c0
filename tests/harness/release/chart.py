"""Packs the Helm chart as a .tgz and as an OCI artefact, with the same bytes from the same files."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

_CONFIG = "application/vnd.cncf.helm.config.v1+json"
_CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def package(folder: Path, epoch: int) -> bytes:
    """Return the archive that `helm package` would write, with all times set to `epoch` (seconds since 1970)."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            data = path.read_bytes()
            info = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder)}")
            info.size, info.mtime, info.mode = len(data), epoch, 0o644
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), mtime=epoch)


def layout(chart: dict[str, object], archive: bytes, epoch: int) -> bytes:
    """Return an OCI image layout, as a tar archive, that registries take for `helm install oci://…`.

    Args:
        chart: content of Chart.yaml.
        archive: the packed chart.
        epoch: time of all entries, in seconds since 1970.
    """
    config = _json(chart)
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _described(_CONFIG, config),
            "layers": [_described(_CONTENT, archive)],
            "annotations": {
                "org.opencontainers.image.title": chart["name"],
                "org.opencontainers.image.version": chart["version"],
                "org.opencontainers.image.source": chart["home"],
            },
        }
    )
    named = {**_described(_MANIFEST, manifest), "annotations": {"org.opencontainers.image.ref.name": chart["version"]}}
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}
    files["index.json"] = _json({"schemaVersion": 2, "manifests": [named]})
    files |= {f"blobs/{_digest(blob).replace(':', '/')}": blob for blob in (config, archive, manifest)}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(data), epoch, 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _described(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}
