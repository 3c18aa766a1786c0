"""Requests with all features at once, for minutes, through a running stack: each answer is an isolated request's.

`python -m harness.endurance` runs it. Nothing here may compute an expected answer in the stack under load.
"""
