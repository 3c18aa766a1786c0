"""Checks of the repository: generated files, coverage of pure modules, commands in the docs."""
