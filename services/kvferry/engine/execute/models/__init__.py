"""Models: forward passes from token ids and positions to logits, with a selected kernel backend.

A model holds parameters but no request state; pages and batch are arguments of each call.
"""
