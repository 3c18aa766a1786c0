"""GGUF files: header, architectures of llama.cpp, tensors by Hugging Face name.

A header becomes a config.json, which `families.registry.read_config` reads, so that a family is defined once. This
folder must not depend on tokenizers or engines.
"""
