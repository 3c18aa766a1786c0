"""`kvferry bench kernels` on a CPU: matrix products by weight format and number of rows, compared with their bounds."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from kvferry.bench.formulas.work import KernelWork
from kvferry.bench.roofline import measure_machine
from kvferry.bench.sampling import alternate
from kvferry.core.clock import Clock
from kvferry.kernels import compiled
from kvferry.weights.config import ModelConfig

FORMS = {
    "float32": ("f32", 0, False),
    "bfloat16": ("bf16", 0, False),
    "Q4_1": ("shipped", 3, False),
    "Q4_1-fast": ("shipped", 3, True),
    "Q8_0": ("shipped", 8, False),
    "Q8_0-fast": ("shipped", 8, True),
}
"""(packed form, GGUF type number of the source, whether inputs are rounded to 8 bits) by name of the weight format."""
ROWS = (1, 4, 16, 64, 512)


@dataclass(frozen=True, slots=True)
class ProductRow:
    """Result of a measured matrix product."""

    op: str
    shape: str
    dtype: str
    ms: float
    bytes: int
    flops: int
    share_of_bound: float


def measure(config: ModelConfig, level: str, threads: int, rounds: int, clock: Clock) -> list[ProductRow]:
    """Measure the widest product of a layer, and the output head, in every format and for several numbers of rows.

    Args:
        config: configuration of the model, from which the shapes follow.
        level: instruction-set level of the compiled kernels.
        threads: number of threads.
        rounds: number of measured rounds.
        clock: clock of the measurement.
    """
    module = compiled.extension()
    assert module is not None, "products are measured only with the compiled module"
    pool, rng = compiled.make_pool(threads), np.random.default_rng(0)
    measured = {}
    for of_bytes in (False, True):  # sequentially, since each measurement allocates its own memory
        measured[of_bytes] = measure_machine(level, threads, clock, of_bytes=of_bytes)()
    found: list[ProductRow] = []
    for op, outputs in (("gate_up", 2 * config.intermediate_size), ("head", config.vocab_size)):
        for dtype, (form, type_id, of_bytes) in FORMS.items():
            matrix = compiled.make_matrix(form, [type_id], outputs, config.hidden_size)
            num_bytes = outputs * module.row_bytes(type_id, config.hidden_size)
            raw = rng.integers(0, 60, num_bytes, dtype=np.uint8)
            if type_id == 0:  # random bits may be denormal numbers, which are slow on some machines
                raw = rng.standard_normal(num_bytes // 4, dtype=np.float32).view(np.uint8)
            memory = compiled.Arena(matrix.num_bytes).take(matrix.num_bytes)
            matrix.pack([type_id], [raw], np.arange(outputs), memory)
            matrix.attach(memory)
            rates = measured[of_bytes]
            for rows in ROWS:
                x = rng.standard_normal((rows, config.hidden_size), dtype=np.float32)
                out = np.empty((rows, outputs), np.float32)
                action = partial(module.product, pool, level, matrix, x, out, 8 if of_bytes else 16)
                seconds = alternate({op: action}, rounds=rounds, clock=clock)[op].median
                work = KernelWork(matrix.num_bytes, 2 * rows * outputs * config.hidden_size)
                found.append(
                    ProductRow(
                        op=op,
                        shape=f"{rows} x {config.hidden_size} x {outputs}",
                        dtype=dtype,
                        ms=1e3 * seconds,
                        bytes=matrix.num_bytes,
                        flops=work.flops,
                        share_of_bound=rates.seconds(work) / seconds,
                    )
                )
    return found
