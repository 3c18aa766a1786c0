"""Names and sizes of the data types of KV and activations, usable without importing torch."""

FLOAT32, BFLOAT16, FLOAT16, INT8 = "float32", "bfloat16", "float16", "int8"
DTYPES = (FLOAT32, BFLOAT16, FLOAT16, INT8)
"""Data types of stored KV. `int8`: integers from -127 to 127 and a float32 scale (largest magnitude / 127) per token
and head, separately for keys and values; activations are bfloat16."""
ITEM_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, INT8: 1, "float64": 8}
"""Bytes per value by data type; float64 is used only by reference implementations in tests."""
SCALE_BYTES = 4


def row_bytes(dtype: str, values: int) -> int:
    """Return the size in bytes of a token's key, or value, in one head: `values` numbers and, for int8, a scale."""
    return values * ITEM_BYTES[dtype] + (SCALE_BYTES if dtype == INT8 else 0)
