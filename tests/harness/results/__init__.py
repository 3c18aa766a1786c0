"""Published results, reproduced with this code: `python -m harness.results` writes docs/results.md.

Each module has the experiments of one subject; `table` lists the rows. An experiment differs from its baseline by one
switch. It must not depend on the speed of the machine, except where its row says so.
"""
