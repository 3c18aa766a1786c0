"""Python interface of the compiled CPU kernels: instruction set levels, packed matrices, one native call per step.

    level           needs                        multiplies
    portable        any CPU                      floats
    avx2            AVX2, FMA, F16C              floats
    avx512_bf16     AVX-512 (F BW VL DQ)         pairs of bfloat16 into float32; float32 and float16 weights as floats
                    BF16 VNNI
    amx_bf16        also AMX (TILE BF16 INT8)    like avx512_bf16, in tiles of 16 rows

Weights keep the format of the model file, packed in panels of 16 outputs (kernels/cpu/weights/pack.hpp). At every
level, quantized weights can be multiplied with inputs rounded to 8 bits (kernels/cpu/products/bytes.hpp).
"""

import contextlib
import functools
import importlib
import mmap
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import UsageError

if TYPE_CHECKING:
    from kvferry.kernels._cpu import Matrix, Pool, Ranks, Runner

FLOAT_LEVEL = "avx2"
"""Fastest level that does not round activations."""
_ALIGNMENT = 64


@functools.cache
def extension() -> ModuleType | None:
    """Return the compiled module, or `None` if it was not built."""
    try:
        return importlib.import_module("kvferry.kernels._cpu")
    except ImportError:
        return None


def levels() -> list[str]:
    """Return the levels supported by this build and this machine, slowest first; empty without the compiled module."""
    module = extension()
    return list(module.levels()) if module is not None else []


def choose_level(wanted: str | None, *, rounds_activations: bool) -> str:
    """Choose a level of the compiled kernels.

    Args:
        wanted: name of the level; default: the fastest.
        rounds_activations: whether inputs of matrix products may be rounded to bfloat16.

    Raises:
        UsageError: the machine or the build does not support the level.
    """
    usable = levels()
    if wanted is None:
        fit = [level for level in usable if rounds_activations or level in ("portable", FLOAT_LEVEL)]
        if fit:
            return fit[-1]
    elif wanted in usable:
        return wanted
    raise UsageError(
        f"compiled kernels {wanted or ''!r} are not available; available: "
        f"{', '.join(usable) or 'none, they were not built'}",
        field="kernels",
    )


class Arena:
    """Memory for packed matrices: one contiguous range, backed by huge pages if available."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the operating system may not support huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Allocate the next `num_bytes` bytes, aligned for the widest vector registers."""
        start = self._used
        self._used += aligned(num_bytes)
        return self._bytes[start : start + num_bytes]


def aligned(num_bytes: int) -> int:
    """Round a size up to the alignment of `Arena`."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def make_matrix(form: str, types: Sequence[int], rows: int, cols: int) -> "Matrix":
    """Create the description of a packed matrix, whose memory and content are set later.

    Args:
        form: `shipped`, `f32`, `f16` or `bf16`.
        types: GGUF type ids of the tensors in the matrix.
        rows: number of outputs.
        cols: number of inputs.
    """
    module = extension()
    assert module is not None, "the compiled kernels are not built"
    matrix: Matrix = module.Matrix(form, list(types), rows, cols)
    return matrix


def make_pool(threads: int) -> "Pool":
    """Create a pool of `threads` compute threads, including the thread that calls a step.

    Raises:
        UsageError: the threads cannot be created.
    """
    module = extension()
    assert module is not None, "the compiled kernels are not built"
    try:
        pool: Pool = module.Pool(threads)
    except RuntimeError as error:
        raise UsageError(str(error), field="threads") from error
    return pool


def make_runner(
    shape: dict[str, int | float],
    parts: "dict[str, Matrix | npt.NDArray[np.float32] | None]",
    layers: "list[dict[str, Matrix | npt.NDArray[np.float32] | int | dict[str, object] | None]]",
    level: str,
    pool: "Pool",
    ranks: "Ranks | None" = None,
) -> "Runner":
    """Create the native model object, which computes steps.

    Args:
        shape: sizes and constants of the model, by name.
        parts: matrices and vectors outside the layers, by name; `None` where the model has none.
        layers: matrices, vectors and settings of each layer, by name.
        level: instruction set of the kernels, one of `levels()`.
        pool: compute threads.
        ranks: the ranks that compute the model together, if `shape` and the matrices are the share of one of them.
    """
    module = extension()
    assert module is not None, "the compiled kernels are not built"
    runner: Runner = module.Runner(shape, parts, layers, level, pool, ranks)
    return runner


def row_bytes(type_id: int, cols: int) -> int:
    """Return the bytes of a stored row of `cols` values; 0 if `cols` is not a multiple of the type's blocks.

    Args:
        type_id: number of the row format, as in `make_matrix`.
        cols: number of values.
    """
    module = extension()
    assert module is not None, "the compiled kernels are not built"
    num_bytes: int = module.row_bytes(type_id, cols)
    return num_bytes


def ranks_bytes(size: int, hidden: int, rows: int) -> int:
    """Return the bytes of the memory that the ranks of a model share for their sums.

    Args:
        size: number of ranks.
        hidden: size of the model's hidden state.
        rows: maximum number of rows of a step.
    """
    module = extension()
    assert module is not None, "the compiled kernels are not built"
    num_bytes: int = module.Ranks.bytes(size, rows * module.Ranks.row_floats(hidden))
    return num_bytes


def make_ranks(memory: npt.NDArray[np.uint8], rank: int, size: int, hidden: int, rows: int, seconds: float) -> "Ranks":
    """Create this process's end of the sums over ranks.

    Args:
        memory: memory of `ranks_bytes` bytes that all ranks map, zeros at first.
        rank: this process's rank.
        size: number of ranks.
        hidden: size of the model's hidden state.
        rows: maximum number of rows of a step.
        seconds: how long a rank waits for the others; then the group fails.
    """
    module = extension()
    assert module is not None, "the compiled kernels are not built"
    ranks: Ranks = module.Ranks(memory, rank, size, rows * module.Ranks.row_floats(hidden), seconds)
    return ranks


def product(
    pool: "Pool",
    level: str,
    matrix: "Matrix",
    x: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    input_bits: int,
) -> None:
    """Multiply rows with a packed matrix.

    Args:
        pool: compute threads.
        level: kernel level.
        matrix: [rows, cols].
        x: [N, cols], contiguous.
        out: [N, rows]; overwritten.
        input_bits: precision of the inputs if the matrix is quantized: 8, 16 or 32 bits.
    """
    module = extension()
    assert module is not None, "the compiled kernels are not built"
    module.product(pool, level, matrix, x, out, input_bits)


def dequantize(level: str, matrix: "Matrix", rows: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
    """Dequantize rows of a packed matrix.

    Args:
        level: kernel level.
        matrix: [rows, cols].
        rows: [N] indices of rows.
        out: [N, cols]; overwritten.
    """
    module = extension()
    assert module is not None, "the compiled kernels are not built"
    module.dequantize(level, matrix, rows, out)
