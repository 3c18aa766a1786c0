"""Fuzzers of all code that reads external input: `python -m harness.fuzz [--seconds N] [--target NAME]...`.

A target passes bytes to a parser or a server. The run must succeed or end with a documented error, within `MAX_SECONDS`
and the memory limit. Any other outcome is a finding: its input is written to tests/fuzz/corpus/<target> and replayed by
tests/fuzz/test_fuzz.py.
"""
