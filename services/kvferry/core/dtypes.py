"""Names and sizes of the data types of KV and activations, usable without importing torch."""

FLOAT32, BFLOAT16, FLOAT16, INT8, FP8 = "float32", "bfloat16", "float16", "int8", "fp8"
DTYPES = (FLOAT32, BFLOAT16, FLOAT16, INT8, FP8)
"""Data types of stored KV."""
CODED = (INT8, FP8)
"""Data types of codes with a float32 scale per token and head, separately for keys and values: integers from -127 to
127, or e4m3 numbers (Micikevicius et al., FP8 formats for deep learning, 2022) of magnitude up to 448. The scale is the
largest magnitude / 127 or / 448. Activations are bfloat16."""
ITEM_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, INT8: 1, FP8: 1, "float64": 8}
"""Bytes per value by data type; float64 is used only by reference implementations in tests."""
SCALE_BYTES = 4


def row_bytes(dtype: str, values: int) -> int:
    """Return the size in bytes of a token's key, or value, in one head: `values` numbers, and a scale of codes.

    Args:
        dtype: KV data type, a key of `ITEM_BYTES`.
        values: numbers of one key or value, the size of a head.
    """
    return values * ITEM_BYTES[dtype] + (SCALE_BYTES if dtype in CODED else 0)


def activation_dtype(dtype: str) -> str:
    """Return the data type of activations for a data type of KV."""
    return BFLOAT16 if dtype in CODED else dtype
