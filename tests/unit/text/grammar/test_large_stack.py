"""Calls on threads with large stacks: results, errors, and the stacks of other threads."""

import threading
from pathlib import Path

import pytest

from kvferry.text.grammar.large_stack import call_with_stack

MIB = 1 << 20


def test_the_function_runs_on_a_thread_with_the_stack() -> None:
    threads: list[threading.Thread] = []
    before = threading.stack_size()

    def look() -> int:
        threads.append(threading.current_thread())
        return max(
            int(end, 16) - int(begin, 16)
            for begin, end in (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        )

    assert call_with_stack(3000 * MIB, look) >= 2999 * MIB
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
    assert threading.stack_size() == before


def test_errors_are_raised_where_the_function_was_called() -> None:
    with pytest.raises(ZeroDivisionError):
        call_with_stack(MIB, lambda: 1 / 0)


def test_calls_on_several_threads_do_not_change_each_others_stacks() -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda size=size: found.append(call_with_stack(size * MIB, lambda: size)))  # type: ignore[misc]
        for size in range(1, 30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 30))
    assert threading.stack_size() == 0
