"""Measurements of projections with coded weights, and the replacement of a model's projections by such ones."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F

from harness.kernels.coded_cases import coded_weight
from kvferry.bench.formulas.gpu_work import GpuRow, Spec, row
from kvferry.bench.formulas.work import KernelWork
from kvferry.bench.gpu.session import Session
from kvferry.bench.gpu.tuner import in_words
from kvferry.engine.execute.models.transformer import Transformer
from kvferry.engine.execute.models.weights import Mlp
from kvferry.kernels.coded_weights import CodeKind
from kvferry.kernels.gpu import launch
from kvferry.kernels.gpu.device import device_class
from kvferry.kernels.gpu.weights.products import CodedLinear, pack_codes
from kvferry.weights.tensors import linear_weights

GROUP = 128
ROWS = (1, 16, 64)
MATRICES = ((4096, 4096), (14336, 4096), (4096, 14336))
"""(outputs, inputs) of projections of Llama 3.1 8B."""
_FORMS = {CodeKind.INT4: "zeros", CodeKind.INT8: "channel", CodeKind.FP8: "middle"}


def random_linear(
    kind: CodeKind, outputs: int, inputs: int, device: torch.device, *, group: int = GROUP, seed: int = 0
) -> CodedLinear:
    """Create a projection with random codes: zero points per group (4 bits), a scale per output (8 bits), or a scale
    per group of inputs and output (FP8)."""
    found = pack_codes(coded_weight(kind, outputs, inputs, group, _FORMS[kind], device=device, seed=seed), None)
    assert not isinstance(found, str), found
    return found


@torch.inference_mode()
def linear_rows(
    session: Session, *, matrices: Sequence[tuple[int, int]] = MATRICES, counts: Sequence[int] = ROWS
) -> Iterator[GpuRow]:
    """Measure projections with codes of each kind, and with 16-bit weights by the GPU library.

    Args:
        session: the device and its rates.
        matrices: (outputs, inputs) of each matrix.
        counts: numbers of rows.
    """
    name, item = str(session.dtype).removeprefix("torch."), session.dtype.itemsize
    for outputs, inputs in matrices:
        plain = torch.randn(outputs, inputs, device=session.device, dtype=session.dtype)
        for count in counts:
            x = torch.randn(count, inputs, device=session.device, dtype=session.dtype)
            sizes = {"rows": count, "outputs": outputs, "inputs": inputs}
            around, flops = item * count * (inputs + outputs), 2 * count * outputs * inputs
            for kind in CodeKind:
                run = random_linear(kind, outputs, inputs, session.device)
                op = f"linear_{kind.value.lower()}"
                with launch.trial() as launches:
                    run(x)
                by = "; ".join(
                    f"{key[0]}: {in_words(launch.choose(key[0], session.device, key[2]))}" for key in sorted(launches)
                )
                work, spec = KernelWork(run.num_bytes + around, flops), Spec.of(op, **sizes)
                timing = session.timer(lambda run=run, x=x: run(x))  # type: ignore[misc]
                yield row(session.about, spec, work, timing, session.rates, dtype=name, kernels="triton", launch=by)
            work = KernelWork(plain.nbytes + around, flops)
            timing = session.timer(lambda x=x, plain=plain: F.linear(x, plain))  # type: ignore[misc]
            spec = Spec.of("linear_16bit", **sizes)
            yield row(session.about, spec, work, timing, session.rates, dtype=name, kernels="torch", launch="")


@torch.inference_mode()
def use_codes(model: object, kind: CodeKind, *, group: int = GROUP) -> None:
    """Replace the projections of all layers by ones with random codes.

    Args:
        model: a `Transformer` whose layers have plain attention and a dense MLP.
        kind: type of the codes.
        group: inputs of a group.
    """
    assert isinstance(model, Transformer)
    config, device, num_bytes = model.config, model.torch_device, 0
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = []
    for index, layer in enumerate(model.weights.layers):
        shapes = ((heads + 2 * kv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner))
        qkv, output, gate_up, down = (
            random_linear(kind, *shape, device, group=group, seed=4 * index + place)
            for place, shape in enumerate(shapes)
        )
        num_bytes += sum(each.num_bytes for each in (qkv, output, gate_up, down))
        layers.append(replace(layer, qkv=qkv, output=output, mlp=Mlp(gate_up, down)))
    model.weights = replace(model.weights, layers=tuple(layers))
    model.weight_bytes += num_bytes - model.torch_dtype.itemsize * linear_weights(config)


@torch.inference_mode()
def sweep(session: Session, *, outputs: int = 14336, inputs: int = 4096) -> Iterator[str]:
    """Time launch choices of each kind of codes with few and many rows; yield a line for the five fastest of each.

    Args:
        session: the device.
        outputs: number of outputs of the matrix.
        inputs: number of its inputs.
    """
    x = torch.randn(64, inputs, device=session.device, dtype=session.dtype)
    for kind in CodeKind:
        run = random_linear(kind, outputs, inputs, session.device)
        for size, count, rows in (("few", 1, (16,)), ("many", 64, (16, 32, 64))):
            base = launch.choose(f"linear_{kind.value.lower()}", session.device, size)
            found: list[tuple[float, str]] = []
            for tile, block, programs, warps, stages in product(
                rows, (32, 64, 128), (256, 1024), (4, 8) if size == "many" else (2, 4, 8), (2, 3, 4)
            ):
                sizes = {"rows": tile, "outputs": block, "programs": programs}
                choice = replace(
                    base,
                    device=device_class(session.device),
                    shape=size,
                    sizes=sizes,
                    warps=warps,
                    stages=stages,
                )
                with launch.trial([choice]):
                    try:
                        taken = session.timer(lambda run=run, count=count: run(x[:count])).median  # type: ignore[misc]
                    except RuntimeError as error:  # the choice needs more shared memory than there is
                        session.say(f"{choice.op} {in_words(choice)}: {str(error).splitlines()[0]}")
                        continue
                found.append((taken, in_words(choice)))
            for taken, words in sorted(found)[:5]:
                yield f"{base.op:<14} rows={count:<3} {outputs}x{inputs}  {1e3 * taken:8.4f} ms  {words}"
