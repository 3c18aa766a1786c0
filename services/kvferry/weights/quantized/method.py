"""Interface of quantization formats."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.weights.quantized.packed_words import ModuleTensors
from kvferry.weights.quantized.representation import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization format, as configured by a checkpoint."""

    name: str
    """Value of `quant_method`."""
    parts: frozenset[str]
    """Last parts of the names of a quantized module's tensors, other than `weight`."""
    read: Callable[[ModuleTensors], QuantizedMatrix] | None = None
    """Function from the tensors of a module to its matrix. Raises ModelFileError. `None` if `read_many` is set."""
    is_excluded: Callable[[str], bool] = lambda _: False
    """Function that returns whether the fields exclude a module from quantization."""
    dropped: frozenset[str] = frozenset()
    """Last parts of the names of tensors that have no effect here, such as scales of activations."""
    notes: tuple[str, ...] = ()
    """Lines for the log about settings of the checkpoint that are not applied."""
    read_many: Callable[[ModuleTensors], Mapping[str, QuantizedMatrix]] | None = None
    """Function from the tensors of a module to several matrices, by their names under the module; used instead of
    `read`. Raises ModelFileError."""
