"""Step execution: batch arrays, forward pass, logits, sampling.

`runner` is the host-driven runner; `gpu.runner` is its counterpart on a GPU. Neither changes a plan.
"""
