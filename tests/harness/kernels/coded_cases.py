"""Random coded weights for tests and measurements of their kernels."""

import torch

from kvferry.kernels.coded_weights import CodedWeight, CodeKind

FORMS = ("middle", "zeros", "minima", "channel", "order")
"""What a random weight has: codes around the middle of their range, zero points or minima, each with a scale per
group; a scale per output; or inputs in another order."""


def coded_weight(
    kind: CodeKind,
    outputs: int,
    inputs: int,
    group: int,
    form: str = "middle",
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> CodedWeight:
    """Draw a weight whose values have a variance of about 1 / inputs.

    Args:
        kind: type of the codes.
        outputs: number of outputs.
        inputs: number of inputs.
        group: inputs of a group, if the form has groups.
        form: one of `FORMS`.
        device: device of the tensors.
        seed: seed of the values.
    """
    generator = torch.Generator(device).manual_seed(seed)
    top, spread = {CodeKind.INT4: (16, 4.6), CodeKind.INT8: (256, 74.0), CodeKind.FP8: (256, 100.0)}[kind]
    codes = torch.randint(0, top, (outputs, inputs), dtype=torch.uint8, device=device, generator=generator)
    if kind is CodeKind.FP8:
        codes[(codes & 127) == 127] = 0  # NaN
    size = inputs if form == "channel" else group
    shape = (outputs, -(-inputs // size))
    scales = (torch.rand(shape, device=device, generator=generator) + 0.5) / (spread * inputs**0.5)
    zeros = minima = order = None
    if form == "zeros":
        zeros = torch.randint(0, top, shape, dtype=torch.uint8, device=device, generator=generator)
    if form == "minima":
        minima = -scales * 7.3
    if form == "order":
        order = torch.randperm(inputs, device=device, generator=generator)
    is_half = kind is CodeKind.INT4 and form != "minima"  # the other scales are not exact in 16 bits
    return CodedWeight(kind, codes, scales.half().float() if is_half else scales, size, zeros, minima, order)
