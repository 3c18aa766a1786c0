"""Loads the heads of the setting `speculation`, and builds their pages for each engine."""

import logging
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import ModelFileError, UsageError
from kvferry.engine.execute.drafts.eagle_drafts import EagleDrafts
from kvferry.engine.execute.drafts.head_models import EagleModel, MedusaModel
from kvferry.engine.execute.drafts.medusa_drafts import MedusaDrafts
from kvferry.engine.execute.models.compiled import CompiledTransformer
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.tensors.batch import ShownStates
from kvferry.engine.execute.tensors.device import CPU
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.speculation.settings import EAGLE, MEDUSA, SpeculationSettings
from kvferry.kv.pages.layout import KvLayout
from kvferry.weights.config import ModelConfig
from kvferry.weights.files.regular_file import is_present
from kvferry.weights.heads.eagle_head import EagleHead, read_eagle
from kvferry.weights.heads.head_files import CONFIG_FILE
from kvferry.weights.heads.medusa_head import MedusaHeads, read_medusa

_log = logging.getLogger(__name__)
_MAX_HEAD_DIM = 256
"""Largest number of values of an attention head in the compiled kernels; must be a multiple of 16."""


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """A loaded EAGLE head, which engines of this process can use one after another."""

    model: EagleModel
    shown: ShownStates
    """Hidden states of the target model that the head reads."""

    def build(self, block_tokens: int, num_tokens: int, vocab_size: int) -> EagleDrafts:
        """Build the drafts of one engine; see `LoadedDraft.build`."""
        layout = self._layout(block_tokens)
        num_blocks = max(1, -(-num_tokens // block_tokens))
        _log.info("EAGLE head: %d MiB for KV", num_blocks * layout.block_bytes >> 20)
        return EagleDrafts(self.model, PagedKv.allocate(layout, num_blocks))

    def kv_share(self, config: ModelConfig) -> float:
        """Return the ratio of KV bytes per token, the head's to the target model's."""
        own = self._layout(1).block_bytes
        return own / KvLayout.of(config, block_tokens=1, dtype=self.model.dtype).block_bytes

    def _layout(self, block_tokens: int) -> KvLayout:
        return KvLayout.of(self.model.config, block_tokens=block_tokens, dtype=self.model.dtype)


@dataclass(frozen=True, slots=True)
class LoadedMedusa:
    """Loaded Medusa heads, which engines of this process can use one after another."""

    model: MedusaModel
    shown: ShownStates
    """Hidden states of the target model that the heads read."""

    def build(self, block_tokens: int, num_tokens: int, vocab_size: int) -> MedusaDrafts:
        """Build the drafts of one engine; see `LoadedDraft.build`."""
        return MedusaDrafts(self.model)

    def kv_share(self, config: ModelConfig) -> float:
        """Return 0: the heads have no KV."""
        return 0.0


def load_heads(parsed: SpeculationSettings, model: Model) -> LoadedEagle | LoadedMedusa | None:
    """Load the heads named in the settings; `None` if there are none.

    Args:
        parsed: the setting `speculation`.
        model: the target model.

    Raises:
        UsageError: the kernels of the target model do not support heads.
        ModelFileError: a file is missing or damaged, or the head does not fit the model.
    """
    if parsed.method not in (EAGLE, MEDUSA):
        return None
    if model.device != CPU or model.kernels == "triton":
        raise UsageError(
            f"heads need the compiled or torch kernels on a CPU, not {model.kernels!r} on {model.device}; use "
            "draft=MODEL or auto",
            field="speculation",
        )
    if model.config.embedding_scale != 1.0:
        raise UsageError(
            f"heads are not supported for models that scale their embeddings, such as {model.config.name}; use "
            "draft=MODEL or auto",
            field="speculation",
        )
    folder = Path(parsed.draft_model)
    if not is_present(folder / CONFIG_FILE):
        raise ModelFileError(
            f"{folder} has no {CONFIG_FILE}; in {parsed.method}=FOLDER, name the checkpoint folder of a speculation "
            "head",
            field="speculation",
        )
    if parsed.method == EAGLE:
        head = read_eagle(folder, model.config)
        return LoadedEagle(_eagle(head, model, folder), ShownStates(head.layers))
    return LoadedMedusa(_medusa(read_medusa(folder, model.config), model), ShownStates())


def _eagle(head: EagleHead, model: Model, folder: Path) -> EagleModel:
    if not isinstance(model, CompiledTransformer):
        from kvferry.engine.execute.drafts.torch_heads import TorchEagle  # importing torch takes a second
        from kvferry.engine.execute.models.transformer import Transformer

        assert isinstance(model, Transformer)
        return TorchEagle(head, model)
    from kvferry.engine.execute.drafts.compiled_heads import CompiledEagle

    if head.config.head_dim % 16 or head.config.head_dim > _MAX_HEAD_DIM:
        raise ModelFileError(
            f"{folder}: head_dim is {head.config.head_dim}, but the compiled kernels support only multiples of 16 up "
            f"to {_MAX_HEAD_DIM}; use --kernels torch",
            field="head_dim",
        )
    found = CompiledEagle(head, model)
    _log.info("EAGLE head: %.1f MiB of weights per draft token", found.weight_bytes / (1 << 20))
    return found


def _medusa(heads: MedusaHeads, model: Model) -> MedusaModel:
    if not isinstance(model, CompiledTransformer):
        from kvferry.engine.execute.drafts.torch_heads import TorchMedusa
        from kvferry.engine.execute.models.transformer import Transformer

        assert isinstance(model, Transformer)
        return TorchMedusa(heads, model)
    from kvferry.engine.execute.drafts.compiled_heads import CompiledMedusa

    found = CompiledMedusa(heads, model)
    _log.info("Medusa heads: %.1f MiB of weights per draft token", found.weight_bytes / (1 << 20))
    return found
