"""An image of empty mount points, whose containers use this machine's Python environment, mounted read-only.

It is used by pods with `runtimeClassName: host` and avoids packing a large environment after every change.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from harness.kube.image import NONROOT, Entry, Image, write_archive
from kvferry.bench.commit import ROOT

NAME = "localhost/kvferry-host:1"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
ACCOUNTS = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/false\nnonroot:x:{NONROOT}:{NONROOT}:nonroot:/tmp:/bin/false\n",
    "etc/group": f"root:x:0:\nnonroot:x:{NONROOT}:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
_COPIED = ("/etc/ld.so.cache", "/etc/ssl/certs/ca-certificates.crt")


def folders(more: Iterable[Path] = ()) -> list[Path]:
    """Return the host folders to mount: system libraries, the interpreter, the environment and the checkout.

    Args:
        more: additional folders, for example with models.
    """
    system = [Path(name) for name in _SYSTEM if Path(name).is_dir() and not Path(name).is_symlink()]
    wanted = [*system, Path(sys.base_prefix), Path(sys.prefix), ROOT, *(one.resolve() for one in more)]
    return outermost(wanted)


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that are not inside another one of the paths."""
    distinct = sorted(set(paths))
    return [path for path in distinct if not any(other in path.parents for other in distinct)]


def write(out: Path, mounts: Iterable[Path]) -> Path:
    """Write the archive and return its path; the entry point is `kvferry` of the current Python environment."""
    environment = Path(sys.prefix)
    env = {"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": "/tmp", "PYTHONSAFEPATH": "1"}
    image = Image(NAME, [str(environment / "bin" / "kvferry")], env)
    write_archive(out, image, [entries(mounts)])
    return out


def entries(mounts: Iterable[Path]) -> list[Entry]:
    """Return the entries of the image: mount points, their parent folders, user accounts, and the system's symbolic
    links to folders."""
    places = {"tmp", "etc", "proc", "sys", "dev", "run"}
    for path in (*mounts, *(Path(name).parent for name in _COPIED)):
        places |= {str(one).lstrip("/") for one in (path, *path.parents)}
    places.discard("")
    made = [Entry(place, 0o1777 if place == "tmp" else 0o755) for place in sorted(places)]
    made += [Entry(name, 0o644, data=text.encode()) for name, text in ACCOUNTS.items()]
    made += [Entry(name.lstrip("/"), 0o644, source=Path(name)) for name in _COPIED if Path(name).is_file()]
    made += [Entry(name.lstrip("/"), target=str(Path(name).readlink())) for name in _SYSTEM if Path(name).is_symlink()]
    return made
