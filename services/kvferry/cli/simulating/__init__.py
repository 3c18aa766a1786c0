"""Subcommands that simulate fleets (`simulate`, `plan`, `tune`), and the live runs that `tune` ends with.

A new question to the simulator belongs here. These modules read files, call the simulator and print: no decisions.
"""
