"""Masks of constrained sequences: compiled and computed on threads, while steps run.

`grammar_masks` is the only module; what a grammar is and allows is in `kvferry.model.grammar`. This package must not
depend on scheduling or tensors.
"""
