"""Sampling on GPUs: changes of logits and log-probabilities (`logits`), and the draw of a token (`draw`), which
counts weights in bins (`bins`) and searches in one bin (`search`). Imports only `kernels`.
"""
