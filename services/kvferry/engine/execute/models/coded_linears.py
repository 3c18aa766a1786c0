"""Projections of quantized checkpoints whose weights stay codes in device memory, if the kernels multiply codes."""

import logging

import numpy as np
import torch

from kvferry.core.errors import ModelFileError
from kvferry.kernels.coded_weights import CodedWeight, CodeKind
from kvferry.kernels.ops import CodedProjection, Linear, Ops
from kvferry.weights.quantized.grouped import CodeType, GroupedCodes, GroupedSource
from kvferry.weights.tensors import HEAD, TensorSource

_log = logging.getLogger(__name__)
_KINDS = {CodeType.INT4: CodeKind.INT4, CodeType.INT8: CodeKind.INT8, CodeType.FP8: CodeKind.FP8}


class CodedLinears:
    """Builds projections from codes, and keeps account of them."""

    def __init__(self, tensors: TensorSource, ops: Ops, device: torch.device) -> None:
        """
        Args:
            tensors: the stored tensors; only a `GroupedSource` has codes.
            ops: operations of the kernel backend.
            device: device of the weights.
        """
        self._source = tensors if ops.pack_codes is not None and isinstance(tensors, GroupedSource) else None
        self._ops = ops
        self._device = device
        self._chosen: dict[str, list[str]] = {}
        self.values = 0
        """Number of weights that are codes."""
        self.num_bytes = 0
        """Their bytes in memory, scales included."""

    def linear(self, names: tuple[str, ...], bias: torch.Tensor | None) -> Linear | None:
        """Build a fused projection; `None` if a part of it has to be dequantized.

        Args:
            names: names of the weights, which have the same inputs.
            bias: [outputs of all weights]; `None` without a bias.

        Raises:
            ModelFileError: a scale or an FP8 value is not finite.
        """
        if self._source is None or names == (HEAD,) or self._ops.pack_codes is None:
            return None
        parts: list[GroupedCodes] = []
        for name in names:
            found = self._source.grouped(name)
            if found is None:
                if parts:  # another tensor of this projection is quantized
                    self._note("dequantized: only some of the tensors with the same inputs have codes", name)
                return None
            if not found.is_finite:
                raise ModelFileError(f"tensor {name!r} holds values that are not finite")
            parts.append(found)
        joined = _joined(parts)
        if joined is None:
            self._note("dequantized: tensors with the same inputs have different formats", names[0])
            return None
        weight = on_device(joined, self._device)
        packed = self._ops.pack_codes(weight, bias)
        if isinstance(packed, str):
            self._note(f"dequantized: {packed}", names[0])
            return None
        self._count(packed, weight)
        self._note(f"{weight.kind.value} kernel, {_title(joined)}", names[0])
        return packed

    def report(self) -> None:
        """Log one line for each distinct choice, with its reason."""
        for choice, names in self._chosen.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            _log.info("weights on %s: %s%s: %s", self._device, names[0], more, choice)

    def _note(self, choice: str, name: str) -> None:
        self._chosen.setdefault(choice, []).append(name)

    def _count(self, packed: CodedProjection, weight: CodedWeight) -> None:
        self.values += weight.codes.numel()
        self.num_bytes += packed.num_bytes


def _title(codes: GroupedCodes) -> str:
    shift = "minima" if codes.minima is not None else "zero points" if codes.zeros is not None else ""
    scales = f"a scale per {codes.group} inputs" if codes.scales.shape[1] > 1 else "a scale per output"
    return ", ".join(filter(None, (scales, shift, "inputs sorted by group" if codes.order is not None else "")))


def _joined(parts: list[GroupedCodes]) -> GroupedCodes | None:
    """Concatenate the outputs of matrices with the same inputs; `None` if they do not have one form."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        is_alike = (part.kind, part.group) == (first.kind, first.group) and (part.minima is None) == (
            first.minima is None
        )
        if not is_alike or not _are_equal(part.order, first.order):
            return None
    minima = [part.minima for part in parts if part.minima is not None]
    return GroupedCodes(
        first.kind,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        first.group,
        _zeros_of(parts),
        np.concatenate(minima) if minima else None,
        first.order,
    )


def _zeros_of(parts: list[GroupedCodes]) -> np.ndarray | None:
    if all(part.zeros is None for part in parts):
        return None
    middle = 1 << (parts[0].kind.value - 1)
    return np.concatenate(
        [np.full(part.scales.shape, middle, np.uint8) if part.zeros is None else part.zeros for part in parts]
    )


def _are_equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def on_device(codes: GroupedCodes, device: torch.device) -> CodedWeight:
    """Copy codes to a device.

    Args:
        codes: the codes.
        device: the device.
    """

    def moved(values: np.ndarray) -> torch.Tensor:
        # Views of a mapped file are read-only; torch warns about them.
        owned = values if values.flags.writeable and values.flags.c_contiguous else values.copy()
        return torch.from_numpy(owned).to(device)

    zeros, minima, order = (None if part is None else moved(part) for part in (codes.zeros, codes.minima, codes.order))
    kind = _KINDS[codes.kind]
    return CodedWeight(kind, moved(codes.codes), moved(codes.scales), codes.group, zeros, minima, order)
