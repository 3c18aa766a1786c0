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
_END_SECONDS = 120.0


def command(markers: str, cache: str, options: Sequence[str]) -> list[str]:
    """One run of pytest; nothing that failed before means nothing to try again."""
    fixed = ("-m", markers, "-o", f"cache_dir={ROOT / '.pytest_cache' / cache}", "--last-failed-no-failures=none")
    return [sys.executable, "-m", "pytest", *fixed, *options]


def runs_again(cache: str, options: Sequence[str], root: Path = ROOT) -> bool:
    """Whether a run begins: with `--last-failed` only if its cache knows of a failure."""
    asks_for_failed = not {"--last-failed", "--lf"}.isdisjoint(options)
    return not asks_for_failed or (root / ".pytest_cache" / cache / "v" / "cache" / "lastfailed").exists()


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
    runs: list[subprocess.Popen[bytes]] = []
    with TemporaryFile() as words:
        try:
            if runs_again("cluster", options):
                plain = command("cluster and not node and not long", "cluster", options)
                runs.append(subprocess.Popen(plain, cwd=ROOT, stdout=words, stderr=subprocess.STDOUT, process_group=0))
            if runs_again("node", options):
                runs.append(subprocess.Popen(command("node and not long", "node", options), cwd=ROOT, process_group=0))
            statuses = [run.wait() for run in reversed(runs)]
        except KeyboardInterrupt:
            end(runs)
            statuses = [_INTERRUPTED]
        finally:
            words.seek(0)
            sys.stdout.flush()
            if said := words.read():
                sys.stdout.buffer.write(b"--- the tests without a node\n" + said)
            sys.stdout.flush()
    return status_of(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
