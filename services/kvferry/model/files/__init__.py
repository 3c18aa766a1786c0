"""Model files: GGUF, safetensors folders, embedded models from package registries.

All counts, lengths and offsets from files are checked before use. Uses numpy but not torch.
"""
