"""Models as forward passes: token ids and positions to hidden states, through the table of kernels.

A model keeps its parameters and nothing of any request; pages and batch come with each call.
"""
