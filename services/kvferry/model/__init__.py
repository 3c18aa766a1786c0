"""Model files and text: where weights come from, what they say, and how text becomes tokens and back.

Only numpy here, never torch: the gateway tokenizes with this package, and a gateway carries no tensors.
Nothing in this package computes with a model; the engine does.
"""
