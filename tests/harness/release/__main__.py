"""Builds a release into build/release: sdist, wheels, chart, SBOM, checksums and, on request, the image.

    make release                                   of the commit that is checked out
    make release ARGS="--image"                    with the OCI image, which takes minutes and gigabytes
    make release ARGS="--fold"                     only fold docs/changes into CHANGELOG.md

Nothing is published. All times are that of the commit, so that the same commit gives the same bytes.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
import yaml

from harness.release import changelog, chart

ROOT = Path(__file__).resolve().parents[3]
PYTHONS = ("3.11", "3.12")
"""A wheel of the stable ABI for 3.12 and newer; 3.11 has no stable ABI that nanobind can use."""
_SECONDS = 1800.0


def absolute_links(text: str, source: str, version: str) -> str:
    """Return a page whose relative links lead to the files of a version, as a package index needs.

    Args:
        text: page in Markdown.
        source: address of the repository.
        version: released version; its tag is `vVERSION`.
    """
    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", rf"]({source}/blob/v{version}/\1)", text)


def _run(command: Sequence[str | Path], cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, stdout=subprocess.PIPE, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        raise click.ClickException(f"{' '.join(map(str, command[:6]))} exited with {done.returncode}; see above")
    return done.stdout


def _interpreter(version: str) -> str:
    """Return the path of an interpreter with this version."""
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found = shutil.which(f"python{version}") if not managed else str(managed[-1])
    if found is None:
        raise click.ClickException(
            f"Python {version} was not found, and a release has a wheel for it; install it, or name others: --python"
        )
    return found


def _environment(folder: Path, python: str, lock: str) -> Path:
    """Create a virtual environment with the packages of a lock; returns its interpreter."""
    _run([python, "-m", "venv", "--clear", folder])
    inside = folder / "bin/python"
    _run(
        [
            inside,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
            "-r",
            ROOT / lock,
        ]
    )
    return inside


def _build(python: Path, hook: str, source: Path, out: Path, epoch: str) -> Path:
    code = f"import sys\nfrom scikit_build_core.build import {hook}\nprint({hook}(sys.argv[1]))"
    tools = f"{python.parent}:{os.environ['PATH']}"
    output = _run([python, "-c", code, out], source, SOURCE_DATE_EPOCH=epoch, PATH=tools)
    return out / output.strip().splitlines()[-1]


def _checksums(folder: Path) -> str:
    lines = []
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name != "SHA256SUMS"):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return "".join(lines)


def _fold(version: str, epoch: int) -> None:
    folder, page = ROOT / "docs/changes", ROOT / "CHANGELOG.md"
    fragments = [changelog.parse(path.name, path.read_text("utf-8")) for path in sorted(folder.glob("*"))]
    date = datetime.fromtimestamp(epoch, UTC).date().isoformat()
    page.write_text(changelog.fold(page.read_text("utf-8"), fragments, version, date), encoding="utf-8")
    for one in fragments:
        (folder / one.name).unlink()
    click.echo(f"CHANGELOG.md: {version} ({date}), {len(fragments)} fragments folded and deleted; read it, and commit")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "build/release", help="Folder of the results.")
@click.option("--python", "pythons", multiple=True, default=PYTHONS, help="Versions of Python that get a wheel.")
@click.option("--image", is_flag=True, help="Build the OCI image for CPUs, too.")
@click.option("--fold", is_flag=True, help="Only fold docs/changes into CHANGELOG.md.")
def main(out: Path, pythons: tuple[str, ...], image: bool, fold: bool) -> None:
    """Build a release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    version, address = project["version"], project["urls"]["Source"]
    epoch = _run(["git", "log", "-1", "--format=%ct"]).strip()
    if fold:
        _fold(version, int(epoch))
        return
    if changed := _run(["git", "status", "--porcelain", "--untracked-files=no"]).strip():
        raise click.ClickException(f"a release is built from a commit; commit or discard these changes:\n{changed}")
    out = out.resolve()
    work, dist = out.with_name(out.name + "-work"), out
    for folder in (work, dist):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    source = work / "source"
    source.mkdir()
    click.echo(f"kvferry {version} of {_run(['git', 'rev-parse', '--short=12', 'HEAD']).strip()}, into {dist}")
    _run(["git", "archive", "-o", work / "source.tar", "HEAD"])  # only what is committed
    _run(["tar", "-x", "-f", work / "source.tar", "-C", source])
    readme = source / "README.md"
    readme.write_text(absolute_links(readme.read_text("utf-8"), address, version), encoding="utf-8")

    tools = _environment(work / "tools", sys.executable, "requirements-release.lock")
    for number, wanted in enumerate(pythons):
        click.echo(f"wheel for Python {wanted}")
        python = _environment(work / f"python-{wanted}", _interpreter(wanted), "requirements-build.lock")
        if number == 0:
            _build(python, "build_sdist", source, dist, epoch)
        wheel = _build(python, "build_wheel", source, work, epoch)
        path = f"{tools.parent}:{os.environ['PATH']}"
        repair: list[str | Path] = [tools, "-m", "auditwheel", "repair", "--wheel-dir", dist, wheel]
        _run(repair, SOURCE_DATE_EPOCH=epoch, PATH=path)
    _run([tools, "-m", "twine", "check", "--strict", *sorted(dist.iterdir())])

    click.echo("chart")
    described = yaml.safe_load((source / "charts/kvferry/Chart.yaml").read_text("utf-8"))
    packed = chart.package(source / "charts/kvferry", int(epoch))
    (dist / f"kvferry-chart-{version}.tgz").write_bytes(packed)
    (dist / f"kvferry-chart-{version}.oci.tar").write_bytes(chart.layout(described, packed, int(epoch)))

    click.echo("bill of materials")
    bill = dist / f"kvferry-{version}.cdx.json"
    _run(
        [tools, "-m", "cyclonedx_py", "requirements", "--output-reproducible", "--pyproject", source / "pyproject.toml",
         "--of", "JSON", "-o", bill, source / "requirements-run.lock"]
    )  # fmt: skip
    if image:
        archive = dist / f"kvferry-{version}-image.oci.tar"
        _run([sys.executable, "-m", "harness.kube", "image", archive], SOURCE_DATE_EPOCH=epoch)
    notes = changelog.section((source / "CHANGELOG.md").read_text("utf-8"), version)
    (dist / "NOTES.md").write_text(notes, encoding="utf-8")
    (dist / "SHA256SUMS").write_text(_checksums(dist), encoding="utf-8")
    shutil.rmtree(work)
    click.echo((dist / "SHA256SUMS").read_text("utf-8"), nl=False)


if __name__ == "__main__":
    main()
