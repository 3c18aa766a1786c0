"""Adapters of an engine: the registered adapters, the copies of their weights in host memory, and the slots, which
determine the adapters that a step can use. Pure; files are read by a function that the caller passes in.
"""
