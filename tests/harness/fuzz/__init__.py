"""Fuzzers of everything that comes from outside: `python -m harness.fuzz [--seconds N] [--target NAME]...`.

A target turns bytes into one use of a parser or a server. It must end with one of the documented errors, in
`MAX_SECONDS` and within the memory limit; anything else is a finding, which is written to tests/fuzz/corpus/<target>
and replayed by tests/fuzz/test_fuzz.py from then on.
"""
