"""Models: forward passes from token ids and positions to logits, with a selected kernel family.

A model holds its parameters and no request state; pages and batch are arguments of each call.
"""
