"""`kvferry bench kernels`: one matrix product at a time, by form of weights and number of rows, against its bound."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvferry.bench.roofline import Machine, Work
from kvferry.bench.sampling import alternate
from kvferry.core.clock import Clock
from kvferry.kernels import compiled
from kvferry.model.config import ModelConfig

FORMS = {"float32": ("f32", 0), "bfloat16": ("bf16", 0), "Q4_1": ("shipped", 3), "Q8_0": ("shipped", 8)}
"""Name to the packed form and the GGUF number of the type that it is made from."""
ROWS = (1, 4, 16, 64, 512)
_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Row:
    """One product."""

    op: str
    shape: str
    dtype: str
    ms: float
    bytes: int
    flops: int
    share_of_bound: float


def measure(config: ModelConfig, level: str, machine: Callable[[], Machine], threads: int, clock: Clock) -> list[Row]:
    """A layer's widest product and the head, in every form and for several numbers of rows."""
    module = compiled.extension()
    assert module is not None, "asked only where it was built"
    pool, rng = compiled.make_pool(threads), np.random.default_rng(0)
    found: list[Row] = []
    for op, outputs in (("gate_up", 2 * config.intermediate_size), ("head", config.vocab_size)):
        for dtype, (form, type_id) in FORMS.items():
            matrix = compiled.make_matrix(form, [type_id], outputs, config.hidden_size)
            num_bytes = outputs * module.row_bytes(type_id, config.hidden_size)
            raw = rng.integers(0, 60, num_bytes, dtype=np.uint8)
            if type_id == 0:  # random bits would be denormal now and then, which some machines take long over
                raw = rng.standard_normal(num_bytes // 4, dtype=np.float32).view(np.uint8)
            memory = compiled.Arena(matrix.num_bytes).take(matrix.num_bytes)
            matrix.pack([type_id], [raw], np.arange(outputs), memory)
            matrix.attach(memory)
            rates = machine()
            for rows in ROWS:
                x = rng.standard_normal((rows, config.hidden_size), dtype=np.float32)
                out = np.empty((rows, outputs), np.float32)
                action = partial(module.product, pool, level, matrix, x, out)
                seconds = alternate({op: action}, rounds=_ROUNDS, clock=clock)[op].median
                work = Work(matrix.num_bytes, 2.0 * rows * outputs * config.hidden_size)
                found.append(
                    Row(
                        op=op,
                        shape=f"{rows} x {config.hidden_size} x {outputs}",
                        dtype=dtype,
                        ms=1e3 * seconds,
                        bytes=matrix.num_bytes,
                        flops=int(work.flops),
                        share_of_bound=work.seconds(rates) / seconds,
                    )
                )
    return found
