"""Quantized safetensors: schemes of quantization_config, matrices of codes and scales, and how each matrix is kept.

A format is one module that reads its fields and tensors; what it returns (`QuantizedMatrix`) is the same for all, and
`representation` chooses what the kernels multiply. Nothing here opens files or computes with activations.
"""
