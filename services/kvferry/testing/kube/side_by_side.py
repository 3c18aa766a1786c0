"""`make test-cluster`: tests with a node beside tests without one, since both wait more than they compute.

    python -m kvferry.testing.kube.side_by_side [pytest's options]

Each run has clusters and a pytest cache of its own. The run with a node speaks at once; what the other said comes when
it has ended. The status is 0 if neither failed; options may leave one of the two without tests. With `--last-failed`
only those runs begin again of which something failed.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

from kvferry.bench.commit import ROOT

_NO_TESTS = 5
"""How pytest ends when nothing was selected."""
_INTERRUPTED = 2
_STATUS = "status"
"""A file in a run's cache: how pytest ended."""
_END_SECONDS = 120.0
_RUNS = (("cluster", "cluster and not node and not long"), ("node", "node and not long"))
"""Caches and markers; the last speaks at once."""


def command(markers: str, cache: str, options: Sequence[str]) -> list[str]:
    """One run of pytest."""
    return [sys.executable, "-m", "pytest", "-m", markers, "-o", f"cache_dir={_home(cache, ROOT)}", *options]


def note_status(cache: str, status: int, root: Path = ROOT) -> None:
    """Keep how a run ended, for `runs_again`."""
    home = _home(cache, root)
    home.mkdir(parents=True, exist_ok=True)
    (home / _STATUS).write_text(f"{status}\n")


def runs_again(cache: str, options: Sequence[str], root: Path = ROOT) -> bool:
    """Whether a run begins: with `--last-failed` unless it is known to have ended well."""
    if {"--last-failed", "--lf"}.isdisjoint(options):
        return True
    last = _home(cache, root) / _STATUS
    return not last.exists() or last.read_text().strip() not in {"0", str(_NO_TESTS)}


def _home(cache: str, root: Path) -> Path:
    return root / ".pytest_cache" / cache


def status_of(statuses: Sequence[int]) -> int:
    """Of all runs together: the first that failed; else 0 if any had tests."""
    failed = [status for status in statuses if status not in (0, _NO_TESTS)]
    return failed[0] if failed else min(statuses, default=_NO_TESTS)


def end(runs: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let them take down what they started; they are told as by Ctrl-C, once."""
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
    """Run both; pytest's status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = [run for run in _RUNS if runs_again(run[0], options)]
    if not begun:
        sys.stderr.write("neither run had a failure before, so nothing is tried again\n")
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
