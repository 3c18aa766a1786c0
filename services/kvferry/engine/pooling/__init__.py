"""Pooled vectors of prompts: which rows a vector needs, and how their hidden states are combined. Pure.

The runner sums the hidden states of a step's rows (`engine.run.pooler`); the sums of all steps become the vector here.
"""
