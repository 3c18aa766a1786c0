"""Reads a checkpoint of a loaded model, as other weights for its engine. Nothing that is in use changes.

The whole checkpoint is read into memory beside the weights in use, and everything that could make it unusable is found
before the engine uses it: another configuration, other names, shapes or types of tensors, values that are not finite.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from kvferry.core.errors import InvalidRequest, ModelFileError
from kvferry.core.process.memory import resident_memory, usable_memory
from kvferry.engine.build import LoadedModel, with_weights
from kvferry.engine.execute.drafts.load_heads import LoadedEagle, LoadedMedusa
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.ranks.ranked_model import RankedModel
from kvferry.engine.execute.run.runner import Runner
from kvferry.model.source import WeightSource, open_weights
from kvferry.weights.config import ModelConfig
from kvferry.weights.tensors import TensorSource

_MAY_DIFFER = {"name", "eos_token_ids"}
"""Fields of the configuration that do not change the computation: the name is the folder's, and the ends also come from
the tokenizer."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedWeights:
    """A checkpoint in memory."""

    model: Model
    digest: str
    """Digest of its files."""


def check_changeable(loaded: LoadedModel, runner: Runner) -> None:
    """Check that the weights of a running engine can be changed.

    Raises:
        InvalidRequest: they cannot; the message has the reason and a remedy.
    """
    why = runner.why_no_new_weights
    if isinstance(loaded.model, RankedModel):
        why = "the ranks of tensor_parallel hold them; restart the worker"
    elif isinstance(loaded.draft, LoadedEagle | LoadedMedusa):
        why = "the heads of speculation read the model's own matrices; use another kind of drafts, or none"
    if why is not None:
        raise InvalidRequest(f"the weights of this worker cannot be changed: {why}", reason="WEIGHTS_NOT_SUPPORTED")


def load_weights(loaded: LoadedModel, path: Path) -> LoadedWeights:
    """Read a checkpoint; blocks for as long as loading the model does. Thread-safe.

    Args:
        loaded: the model in use.
        path: a Hugging Face folder or a GGUF file with a checkpoint of the same model.

    Raises:
        ModelFileError: the files are missing or damaged, or of another model.
        InvalidRequest: a second copy of the weights does not fit into memory.
    """
    assert loaded.source is not None, "workers serve models with files"
    found = open_weights(path)
    settings = loaded.settings
    config = found.config.served(settings.max_model_len)
    _check_config(config, loaded.config)
    _check_tensors(found, loaded.source.tensors)
    needed, free = loaded.model.weight_bytes, usable_memory() - resident_memory()
    if needed > free:
        raise InvalidRequest(
            f"a second copy of the weights needs {needed >> 20} MiB, and {max(0, free) >> 20} MiB of this process's "
            "memory limit are free; raise the limit or reduce kv_memory",
            reason="WEIGHTS_TOO_LARGE",
        )
    model = with_weights(settings, loaded.config, found.tensors, loaded.dtype, loaded.model.device)
    return LoadedWeights(model, found.digest())


def _check_config(new: ModelConfig, now: ModelConfig) -> None:
    for field in fields(ModelConfig):
        ours, theirs = getattr(now, field.name), getattr(new, field.name)
        if field.name not in _MAY_DIFFER and ours != theirs:
            raise ModelFileError(
                f"the checkpoint is of another model: {field.name} is {theirs!r:.60}, and {ours!r:.60} in the model in "
                "use; use a checkpoint of the same model"
            )


def _check_tensors(new: WeightSource, now: TensorSource) -> None:
    ours, theirs = now.shapes(), new.tensors.shapes()
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ModelFileError(
                f"tensor {name!r:.200} has shape {theirs.get(name)} in the checkpoint and {ours.get(name)} in the model"
                " in use (None: it is missing); use a checkpoint of the same model"
            )
        if len(ours[name]) == 2 and (other := new.tensors.stored(name).type_id) != now.stored(name).type_id:
            raise ModelFileError(
                f"tensor {name!r:.200} has type {other} in the checkpoint and {now.stored(name).type_id} in the model "
                "in use (numbers of GGUF types); save the checkpoint in the type of the model"
            )
