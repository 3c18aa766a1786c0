"""Sampling parameters that refer to text or to the prompt. The gateway, workers of role `both` and `LLM` apply them
here, so that a request means the same everywhere."""
