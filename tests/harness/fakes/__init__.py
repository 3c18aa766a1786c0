"""Fakes for unit tests: engines and workers that compute tokens by a rule, and CUDA graphs without a GPU."""
