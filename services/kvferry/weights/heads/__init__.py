"""Heads for speculation, trained for one model: checkpoints in the layouts of EAGLE, EAGLE-3 and Medusa. Pure.

Reads and checks files; computes nothing with them. Does not import the engine.
"""
