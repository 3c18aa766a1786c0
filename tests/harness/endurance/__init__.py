"""Requests with all features at once, for minutes, through a running stack. Each answer must equal that of an isolated
request.

`python -m harness.endurance` runs it. Expected answers must not be computed in the stack under load.
"""
