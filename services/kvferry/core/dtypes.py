"""Number formats of KV and activations by their names, for whoever need not load a library that computes in them."""

FLOAT32, BFLOAT16, FLOAT16, INT8 = "float32", "bfloat16", "float16", "int8"
DTYPES = (FLOAT32, BFLOAT16, FLOAT16, INT8)
"""What KV can be kept in. int8: whole numbers from -127 to 127, and for each token's key, and value, of a head one
float32 that they are multiplied by: the largest of its magnitudes / 127. Activations are kept as with bfloat16."""
ITEM_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, INT8: 1, "float64": 8}
"""Of a value; float64 is what definitions are tested in."""
SCALE_BYTES = 4


def row_bytes(dtype: str, values: int) -> int:
    """Of one token's key, or value, of one head of so many values, with the scale if it has one."""
    return values * ITEM_BYTES[dtype] + (SCALE_BYTES if dtype == INT8 else 0)
