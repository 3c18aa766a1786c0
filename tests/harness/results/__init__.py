"""Experiments that reproduce published results: `python -m harness.results` writes docs/results.md.

Each module has the experiments of one subject; `table` lists the rows. An experiment differs from its baseline by one
switch. It must not depend on the speed of the machine, unless its row says so.
"""
