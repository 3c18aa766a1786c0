"""Checkpoints of whole models: a folder with safetensors files, or GGUF files.

Both yield a configuration and a source of tensors.
"""
