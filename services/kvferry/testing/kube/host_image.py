"""An image with nothing in it but places: its containers see this machine's Python environment, read-only.

For pods with `runtimeClassName: host`. A heavy environment need not be packed and unpacked for every change.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from kvferry.bench.commit import ROOT
from kvferry.core.errors import UsageError
from kvferry.testing.kube.image import NONROOT, Entry, Image, write_archive

NAME = "localhost/kvferry-host:1"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_COVERED = Path("/tmp")  # noqa: S108 - where pods may write
ACCOUNTS = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/false\nnonroot:x:{NONROOT}:{NONROOT}:nonroot:/tmp:/bin/false\n",
    "etc/group": f"root:x:0:\nnonroot:x:{NONROOT}:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
_COPIED = ("/etc/ld.so.cache", "/etc/ssl/certs/ca-certificates.crt")


def why_not(environment: Path = Path(sys.prefix)) -> str:
    """Why containers would not see the environment; empty: they will."""
    if _COVERED not in environment.resolve().parents:
        return ""
    return (
        f"the environment {environment} lies in {_COVERED}, which every pod covers with a folder of its own;"
        " make the checkout somewhere else"
    )


def folders(more: Iterable[Path] = ()) -> list[Path]:
    """What such a container must see: the system's libraries, the interpreter, the environment, the checkout.

    Args:
        more: besides those, models for instance.
    """
    system = [Path(name) for name in _SYSTEM if Path(name).is_dir() and not Path(name).is_symlink()]
    wanted = [*system, Path(sys.base_prefix), Path(sys.prefix), ROOT, *(one.resolve() for one in more)]
    return outermost(wanted)


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Without those that lie within another."""
    distinct = sorted(set(paths))
    return [path for path in distinct if not any(other in path.parents for other in distinct)]


def write(out: Path, mounts: Iterable[Path]) -> Path:
    """The archive, which is also returned; its entry point is `kvferry` of the environment that runs this.

    Raises:
        UsageError: the environment lies where pods have a folder of their own.
    """
    environment = Path(sys.prefix)
    if reason := why_not(environment):
        raise UsageError(reason, field="environment")
    env = {"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": "/tmp", "PYTHONSAFEPATH": "1"}  # noqa: S108
    image = Image(NAME, [str(environment / "bin" / "kvferry")], env)
    write_archive(out, image, [entries(mounts)])
    return out


def entries(mounts: Iterable[Path]) -> list[Entry]:
    """Mount points with the folders above them, accounts, and the links that the system has in place of folders."""
    places = {"tmp", "etc", "proc", "sys", "dev", "run"}
    for path in (*mounts, *(Path(name).parent for name in _COPIED)):
        places |= {str(one).lstrip("/") for one in (path, *path.parents)}
    places.discard("")
    made = [Entry(place, 0o1777 if place == "tmp" else 0o755) for place in sorted(places)]
    made += [Entry(name, 0o644, data=text.encode()) for name, text in ACCOUNTS.items()]
    made += [Entry(name.lstrip("/"), 0o644, source=Path(name)) for name in _COPIED if Path(name).is_file()]
    made += [Entry(name.lstrip("/"), target=str(Path(name).readlink())) for name in _SYSTEM if Path(name).is_symlink()]
    return made
