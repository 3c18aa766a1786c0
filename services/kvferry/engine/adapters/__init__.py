"""Adapters of an engine: those that are registered, the copies of their weights in host memory, and the slots that say
which of them a step computes with. Pure; files are read by a function that the caller passes in.
"""
