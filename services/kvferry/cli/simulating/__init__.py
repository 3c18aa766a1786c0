"""Subcommands that simulate fleets (`simulate`, `plan`, `tune`), and the live runs at the end of `tune`.

New uses of the simulator belong here. These modules read files, call the simulator and print results; they make no
decisions.
"""
