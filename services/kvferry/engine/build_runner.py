"""Which runner a model gets: on a GPU one that stays there, elsewhere the one whose draws are the host's."""

from kvferry.core.errors import UsageError
from kvferry.engine.cache import PagedKv
from kvferry.engine.models.model import Model
from kvferry.engine.runner import Runner
from kvferry.kernels.families import device_kind

AUTO, OFF = "auto", "off"
CUDA_GRAPHS = (AUTO, OFF)
"""Whether steps are captured where they can be, or never."""
_FAMILY = "triton"


def build_runner(model: Model, kv: PagedKv, *, max_sequences: int, cuda_graphs: str = AUTO) -> Runner:
    """A runner for a model and its pages.

    Args:
        model: ready to compute.
        kv: its pages.
        max_sequences: in one step.
        cuda_graphs: a name of `CUDA_GRAPHS`; nothing to capture but with the kernels for GPUs on a GPU.

    Raises:
        UsageError: the name is not known.
        InvariantBroken: the pages are not such as the model needs.
    """
    if cuda_graphs not in CUDA_GRAPHS:
        raise UsageError(f"no cuda_graphs {cuda_graphs!r}; known: {', '.join(CUDA_GRAPHS)}", field="cuda_graphs")
    if device_kind(model.device) != "cuda" or model.kernels != _FAMILY:
        return Runner(model, kv)
    # Imported here: these load torch, which the compiled kernels do without.
    from kvferry.engine.gpu.graph_sizes import token_sizes
    from kvferry.engine.gpu.graphs import CudaGraphs
    from kvferry.engine.gpu.runner import DeviceRunner
    from kvferry.engine.models.transformer import Transformer
    from kvferry.kernels.ops import device_ops_for

    assert isinstance(model, Transformer)
    ops = device_ops_for(model.device, model.kernels)
    graphs = CudaGraphs(model.torch_device) if cuda_graphs == AUTO else None
    return DeviceRunner(model, kv, ops, max_sequences=max_sequences, graphs=graphs, piece_rows=token_sizes())
