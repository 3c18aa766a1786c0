"""Loads the draft model of the setting `speculation`, and builds its pages and runner for each engine."""

import logging
from dataclasses import dataclass

from kvferry.core.dtypes import activation_dtype
from kvferry.core.errors import UsageError
from kvferry.engine.execute.drafts.draft_model import DraftModel
from kvferry.engine.execute.models.build import build_model
from kvferry.engine.execute.models.model import Model
from kvferry.engine.execute.run.runner import Runner
from kvferry.engine.execute.tensors.batch import ShownStates
from kvferry.engine.execute.tensors.paged_kv import PagedKv
from kvferry.engine.schedule.speculation.settings import DRAFT, SpeculationSettings
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.source import ModelSource, open_model
from kvferry.text.tokenizing.tokenizer import Tokenizer
from kvferry.weights.config import ModelConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded draft model, which several engines of this process can share."""

    config: ModelConfig
    model: Model
    dtype: str
    """Data type of its KV."""
    shown: ShownStates | None = None
    """`None`, since a draft model reads no hidden states of the target model."""

    def build(self, block_tokens: int, num_tokens: int, vocab_size: int) -> DraftModel:
        """Build the draft model of one engine.

        Args:
            block_tokens: tokens per page.
            num_tokens: number of tokens that its pages hold, over all sequences.
            vocab_size: vocabulary of the model that verifies.
        """
        layout = KvLayout.of(self.config, block_tokens=block_tokens, dtype=self.dtype)
        num_blocks = max(1, -(-num_tokens // block_tokens))
        _log.info(
            "draft model %s: %d MiB of weights per step, %d MiB for KV of %d tokens",
            self.config.name, self.model.weight_bytes >> 20, num_blocks * layout.block_bytes >> 20,
            num_blocks * block_tokens,
        )  # fmt: skip
        pages = PagedKv.allocate(layout, num_blocks, self.model.device)
        return DraftModel(Runner(self.model, pages), vocab_size=vocab_size)

    def kv_share(self, config: ModelConfig) -> float:
        """Return the ratio of KV bytes per token, the draft model's to the verifying model's."""
        own, others = (KvLayout.of(one, block_tokens=1, dtype=self.dtype).block_bytes for one in (self.config, config))
        return own / others


def load_draft(
    speculation: SpeculationSettings,
    config: ModelConfig,
    source: ModelSource | None,
    *,
    dtype: str,
    device: str,
    kernels: str,
    threads: int,
) -> LoadedDraft | None:
    """Load the draft model named in the settings; `None` if there is none.

    Args:
        speculation: the parsed setting `speculation`.
        config: the model that verifies.
        source: its files; `None` if its weights are random.
        dtype: data type of its KV.
        device: the device of both.
        kernels: kernels of the draft model; see `EngineSettings`.
        threads: its compute threads.

    Raises:
        UsageError: the vocabularies differ, or the model that verifies has no tokenizer.
        KvferryError: the draft model is unknown or damaged, or is not supported on the device.
    """
    if speculation.method != DRAFT:
        return None
    if source is None:
        raise UsageError(
            "a model with random weights cannot have a draft model; leave speculation out", field="speculation"
        )
    found = open_model(speculation.draft_model)
    if (difference := _difference(source.tokenizer, found.tokenizer)) is not None:
        raise UsageError(
            f"{speculation.draft_model} cannot draft for {config.name}, since {difference}; use a draft model of the "
            "same model family",
            field="speculation",
        )
    own = found.config.served(0)
    used = activation_dtype(dtype)
    model = build_model(own, found.tensors, dtype=used, device=device, kernels=kernels, threads=threads)
    return LoadedDraft(own, model, used)


def _difference(verifying: Tokenizer, drafting: Tokenizer) -> str | None:
    """Return how two vocabularies differ; `None` if token ids mean the same in both."""
    if verifying.vocabulary == drafting.vocabulary:
        return None
    return f"its vocabulary has {len(drafting.vocabulary)} tokens instead of {len(verifying.vocabulary)}"
