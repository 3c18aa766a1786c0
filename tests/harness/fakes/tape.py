"""Emulates CUDA graphs on a machine without a GPU: records the operations of an action and replays them.

Like a CUDA graph, a replay does not run the action's Python code: it repeats every operation with the same input and
output tensors as in the first run. Host values are therefore fixed at capture time, and memory that the action
allocated without initializing it is overwritten before each replay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kvferry.engine.execute.gpu.graphs import Launch
from kvferry.kernels.gpu.launch import Choice

_HOST_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique", "aten.is_nonzero")


class Asked(AssertionError):
    """The code has read a value from the device, which a captured step must not do."""


class TapeGraphs:
    """Implements `engine.execute.gpu.graphs.Graphs` with recorded tapes."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, launch: Launch) -> Launch:
        """Run `launch` once, record a second run on a tape, and return the tape's replay."""
        launch()
        tape = _Tape()
        with tape.kernels(), tape:
            launch()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorded operations and kernel launches, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[Callable[[], object]] = []
        self._allocated: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_host_reads(func, args)
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = _tensors(out)
        if func._schema.name.startswith("aten::empty") or func._schema.name.startswith("aten::new_empty"):
            self._allocated += made
        elif func._schema.is_mutable:
            self._calls.append(lambda: func(*args, **kwargs))
        elif made and not {_memory(x) for x in made} & {_memory(x) for x in _tensors((args, kwargs))}:
            self._calls.append(lambda: _copy(_tensors(func(*args, **kwargs)), made))
        return out

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Also record kernel launches during the `with` block."""
        run = Choice.run

        def recorded(choice: Choice, *args: Any, **constants: Any) -> None:
            def again() -> None:
                with _disable_current_modes():
                    run(choice, *args, **constants)

            self._calls.append(again)
            again()

        with mock.patch.object(Choice, "run", recorded):
            yield

    @torch.inference_mode()
    def replay(self) -> None:
        for x in self._allocated:
            x.fill_(torch.nan if x.is_floating_point() else -(1 << 30))
        for call in self._calls:
            call()


class NothingAsked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which reading a value from the device raises `Asked`, except inside interpreted kernels."""

    def __enter__(self) -> Any:
        run, self._names = Choice.run, ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")

        def free(choice: Choice, *args: Any, **constants: Any) -> None:
            for patch in self._patches[1:]:
                patch.stop()
            try:
                with _disable_current_modes():
                    run(choice, *args, **constants)
            finally:
                for patch in self._patches[1:]:
                    patch.start()

        self._patches = [mock.patch.object(Choice, "run", free)]
        self._patches += [mock.patch.object(torch.Tensor, name, _refused(name)) for name in self._names]
        for patch in self._patches:
            patch.start()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for patch in self._patches:
            patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_host_reads(func, args)
        return func(*args, **(kwargs or {}))


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise Asked(f"Tensor.{name} of {tuple(self.shape)}")

    return refuse


def refuse_host_reads(func: Any, args: Any) -> None:
    """Check that an operation does not wait for the device.

    Raises:
        Asked: the operation waits for the device.
    """
    name = str(func)
    if name.startswith(_HOST_READS):
        raise Asked(name)
    if name.startswith("aten.index") and any(x.dtype == torch.bool for x in _tensors(args[1:])):
        raise Asked(f"{name} by a mask")


def _tensors(of: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(of) if isinstance(x, torch.Tensor)]


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _copy(new: list[torch.Tensor], into: list[torch.Tensor]) -> None:
    for source, target in zip(new, into, strict=True):
        target.copy_(source)
