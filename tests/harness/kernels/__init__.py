"""Shared code of kernel tests: cases, tolerances, compilation for GPUs without a GPU, reference models in
transformers."""
