"""Runner selection: the device runner on a GPU, otherwise a runner that samples on the host."""

from kvferry.core.settings.engine import AUTO
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.run.threaded_runner import ThreadedRunner
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.kernels.backends import device_kind

_BACKEND = "triton"


def build_runner(
    model: Model, kv: PagedKv, *, max_sequences: int, cuda_graphs: str = AUTO, runs_ahead: bool = False
) -> Runner:
    """Build the runner for a model and its pages.

    Args:
        model: the model.
        kv: the model's KV pages.
        max_sequences: maximum number of sequences in a step.
        cuda_graphs: `auto` to capture where possible, or `off`; only the GPU kernel backend on a GPU can be captured.
        runs_ahead: whether the engine launches steps ahead; a CPU runner then needs a thread.

    Raises:
        InvariantBroken: shape, dtype or device of the pages differ from the model's.
    """
    if device_kind(model.device) != "cuda" or model.kernels != _BACKEND:
        return ThreadedRunner(model, kv) if runs_ahead else Runner(model, kv)
    # Imported here because they import torch, which the compiled kernels do not need.
    from kvferry.engine.execute.gpu.graphs import CudaGraphs
    from kvferry.engine.execute.gpu.runner import DeviceRunner
    from kvferry.engine.execute.models.transformer import Transformer
    from kvferry.engine.schedule.step.graph_sizes import token_sizes
    from kvferry.kernels.ops import device_ops_for

    assert isinstance(model, Transformer)
    ops = device_ops_for(model.device, model.kernels)
    graphs = CudaGraphs(model.torch_device) if cuda_graphs == AUTO else None
    return DeviceRunner(model, kv, ops, max_sequences=max_sequences, graphs=graphs, piece_rows=token_sizes())
