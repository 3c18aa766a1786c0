"""Sampling on GPUs: changes of logits (`logits`), log-probabilities (`log_probabilities`) and the draw of a token
(`draw`), which sorts weights into bins (`bins`) and searches in one bin (`search`).
"""
