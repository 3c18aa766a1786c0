"""Types of the module with the compiled CPU kernels; see kernels/cpu/module.cpp."""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

def levels() -> list[str]: ...
def row_bytes(type_id: int, cols: int) -> int: ...
def read_all(pool: Pool, level: str, data: Bytes) -> None: ...
def sum_products(pool: Pool, level: str, chunks: int, of_bytes: bool = False) -> float: ...
def product(pool: Pool, level: str, matrix: Matrix, x: Floats, out: Floats, input_bits: int = 16) -> None: ...
def dequantize(level: str, matrix: Matrix, rows: Ints, out: Floats) -> None: ...

class Pool:
    threads: int
    def __init__(self, threads: int) -> None: ...

class Matrix:
    num_bytes: int
    rows: int
    cols: int
    padded_rows: int
    format: str
    def __init__(self, wanted: str, types: list[int], rows: int, cols: int) -> None: ...
    def pack(self, types: list[int], parts: list[Bytes], order: Ints, out: Bytes) -> None: ...
    def attach(self, data: Bytes, bias: Floats | None = None) -> None: ...

class Adapter: ...

class Ranks:
    missing: int
    def __init__(self, memory: Bytes, rank: int, size: int, part_floats: int, seconds: float) -> None: ...
    @staticmethod
    def bytes(size: int, part_floats: int) -> int: ...
    @staticmethod
    def row_floats(hidden: int) -> int: ...
    def fail(self, rank: int) -> None: ...

class Runner:
    def __init__(
        self,
        shape: dict[str, int | float],
        parts: dict[str, Matrix | Floats | None],
        layers: list[dict[str, Matrix | Floats | int | dict[str, object] | None]],
        level: str,
        pool: Pool,
        ranks: Ranks | None = None,
    ) -> None: ...
    def adapter(self, layers: list[dict[str, tuple[list[int], Bytes, Bytes]]], is_bf16: bool) -> Adapter: ...
    def phase_seconds(self) -> dict[str, float]: ...
    def step(
        self,
        tokens: Ints,
        positions: Ints,
        slots: Ints,
        queries: Ints,
        contexts: Ints,
        tables: Ints,
        sampled: Ints,
        pages: int,
        num_pages: int,
        block_tokens: int,
        kv_type: str,
        logits: Floats,
        greedy: Ints,
        finite: Bytes,
        shown: Ints,
        hidden: Floats,
        adapter_of_row: Ints,
        adapters: list[Adapter],
        taps: Ints,
        tapped: Floats,
        residuals: Floats,
        inputs: Floats,
        places: Ints,
        page_layers: int,
        further_slots: Ints,
        further_tables: Ints,
        trees: Ints,
        paths: Ints,
    ) -> None: ...
