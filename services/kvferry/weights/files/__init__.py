"""Files that hold tensors: their bounds, safetensors files, orders of rows, stacked experts.

All counts, lengths and offsets from files are checked before use.
"""
