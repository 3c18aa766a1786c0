"""Trees of draft tokens: their shape, their growth from a head's candidates, and which requests can have them. Pure.

Imports nothing else of the engine.
"""
