"""Reference kernels: every operation in plain torch, against which all other backends are tested.

The code is written for clarity, not speed. New operations are defined here first.
"""
