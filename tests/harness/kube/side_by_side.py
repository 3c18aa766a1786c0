"""`make test-cluster`: runs tests with a node and tests without a node in parallel, since both mostly wait.

    python -m harness.kube.side_by_side [pytest's options]

Each run has separate clusters and a separate pytest cache; the run without a node has two. The output of the run with a
node is printed directly, that of the other run when it ends. The exit status is 0 if neither run failed; options may
deselect all tests of a run. With `--last-failed`, only runs with failures are repeated.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType

from kvferry.bench.commit import ROOT

_NO_TESTS = 5
"""Exit status of pytest if no tests were selected."""
_INTERRUPTED = 2
_STATUS = "status"
"""Name of the file in a run's cache with pytest's exit status."""
_END_SECONDS = 120.0
_RUNS = (("cluster", "cluster and not node and not long"), ("node", "node and not long"))
"""(name of the cache, pytest markers) of each run; the output of the last run is printed directly."""
_SPLITS: Mapping[str, tuple[str, ...]] = MappingProxyType({"cluster": ("-n", "2", "--dist", "loadfile")})
"""Options of a run whose files are divided between processes, each with a cluster of its own."""


def command(markers: str, cache: str, options: Sequence[str]) -> list[str]:
    """Return the command line of one pytest run."""
    own = ["-m", markers, "-o", f"cache_dir={_home(cache, ROOT)}", *_SPLITS.get(cache, ())]
    return [sys.executable, "-m", "pytest", *own, *options]


def note_status(cache: str, status: int, root: Path = ROOT) -> None:
    """Store a run's exit status for `runs_again`."""
    home = _home(cache, root)
    home.mkdir(parents=True, exist_ok=True)
    (home / _STATUS).write_text(f"{status}\n")


def runs_again(cache: str, options: Sequence[str], root: Path = ROOT) -> bool:
    """Return whether to start a run: with `--last-failed`, only if its last run failed."""
    if {"--last-failed", "--lf"}.isdisjoint(options):
        return True
    last = _home(cache, root) / _STATUS
    return not last.exists() or last.read_text().strip() not in {"0", str(_NO_TESTS)}


def _home(cache: str, root: Path) -> Path:
    return root / ".pytest_cache" / cache


def status_of(statuses: Sequence[int]) -> int:
    """Return the combined exit status: that of the first failed run, or else 0 if any run had tests."""
    failed = [status for status in statuses if status not in (0, _NO_TESTS)]
    return failed[0] if failed else min(statuses, default=_NO_TESTS)


def end(runs: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGINT to all runs, like Ctrl-C, so that they clean up."""
    for run in runs:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
    for run in runs:
        try:
            run.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()


def main(options: Sequence[str]) -> int:
    """Start both runs and return the combined exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = [run for run in _RUNS if runs_again(run[0], options)]
    if not begun:
        sys.stderr.write("neither run had failures; there is nothing to repeat\n")
    runs: list[subprocess.Popen[bytes]] = []
    with TemporaryFile() as words:
        try:
            for cache, markers in begun:
                sink = words if cache == "cluster" else None
                asked = command(markers, cache, options)
                runs.append(subprocess.Popen(asked, cwd=ROOT, stdout=sink, stderr=sink, process_group=0))
            statuses = [run.wait() for run in reversed(runs)]
        except KeyboardInterrupt:
            end(runs)
            statuses = [_INTERRUPTED] * len(runs)
        finally:
            words.seek(0)
            sys.stdout.flush()
            if said := words.read():
                sys.stdout.buffer.write(b"--- the tests without a node\n" + said)
            sys.stdout.flush()
    for (cache, _), status in zip(reversed(begun), statuses, strict=False):
        note_status(cache, status)
    return status_of(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
