"""Subcommands of `kvferry`, a module each; heavy imports are deferred until the subcommand runs.

Commands parse arguments, call the library and print the result; they have no serving logic.
"""
