"""Number formats of KV and activations by their names, for whoever need not load a library that computes in them."""

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"
DTYPES = (FLOAT32, BFLOAT16, FLOAT16)
"""What KV can be kept in."""
ITEM_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, "float64": 8}
"""Of a value; float64 is what definitions are tested in."""
