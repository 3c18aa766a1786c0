"""Computation of steps: models, runners, GPU steps, draft models, masks, and the tensors that they share.

A runner executes the plan of a step and never changes it.
"""
