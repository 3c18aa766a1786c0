"""Quantized safetensors: the schemes of quantization_config, matrices of quantized values and scales, and how each
matrix is kept.

A format is one module that reads its fields and tensors; what it returns (`QuantizedMatrix`) is the same for all, and
`representation` chooses the form in which the kernels read a matrix. Nothing here opens files or computes with
activations.
"""
