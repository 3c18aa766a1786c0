"""Masks of constrained sequences: compiled and computed on threads, while steps run.

`grammar_masks` computes the masks; grammars and the tokens that they allow are defined in `kvferry.text.grammar`. This
package must not depend on scheduling or tensors.
"""
