"""Medusa heads: each predicts one further token from the last hidden state (Cai et al., Medusa, 2024, section 3.1).

    head i of position p   h = h(p) after the final norm;   h = h + silu(W h + b) for each block;   logits = lm_head h

predicts token t(p + 2 + i): the target model itself samples t(p + 1) from h(p).
"""

from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import ModelFileError
from kvferry.weights.checkpoints.safetensors_dir import read_json
from kvferry.weights.config import ModelConfig
from kvferry.weights.families.config_fields import ConfigFields
from kvferry.weights.heads.head_files import CONFIG_FILE, HeadTensors, open_head
from kvferry.weights.tensors import Shape

MAX_HEADS, MAX_BLOCKS = 16, 8
_FILES = ("medusa_lm_head.safetensors", "model.safetensors")
_RENAMED = {"medusa_head.": ""}


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    """Heads whose files fit a model."""

    num_heads: int
    num_blocks: int
    """Residual blocks of a head."""
    tensors: HeadTensors

    def block(self, head: int, block: int) -> tuple[str, str]:
        """Return the names of the weight [hidden, hidden] and the bias [hidden] of a residual block.

        Args:
            head: index of the head.
            block: index of the block in the head.
        """
        return f"{head}.{block}.linear.weight", f"{head}.{block}.linear.bias"

    def output(self, head: int) -> str:
        """Return the name of the output head [vocabulary, hidden] of a head.

        Args:
            head: index of the head, from 0.
        """
        return f"{head}.{self.num_blocks}.weight"


def read_medusa(folder: Path, model: ModelConfig) -> MedusaHeads:
    """Read and check heads.

    Args:
        folder: the folder with config.json, and medusa_lm_head.safetensors or model.safetensors.
        model: configuration of the target model.

    Raises:
        ModelFileError: a file is missing or damaged, or the heads do not fit the model; the message names the file, the
            field or tensor, its value and a remedy.
    """
    where = folder / CONFIG_FILE
    fields = ConfigFields(read_json(where), where)
    found = (fields.whole("medusa_num_heads"), fields.whole("medusa_num_layers", 1))
    for field, value, limit in zip(
        ("medusa_num_heads", "medusa_num_layers"), found, (MAX_HEADS, MAX_BLOCKS), strict=True
    ):
        if value > limit:
            raise ModelFileError(f"{where}: {field} is {value}; at most {limit} is supported", field=field)
    for field, expected in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        if (value := fields.whole(field, expected)) != expected:
            raise ModelFileError(
                f"{where}: {field} is {value}, but {model.name} needs {expected}; use heads that were trained for this "
                "model",
                field=field,
            )
    heads = MedusaHeads(*found, open_head(folder, _FILES, _RENAMED, ()))
    shapes: dict[str, Shape] = {}
    for head in range(heads.num_heads):
        for block in range(heads.num_blocks):
            weight, bias = heads.block(head, block)
            shapes |= {weight: (model.hidden_size, model.hidden_size), bias: (model.hidden_size,)}
        shapes[heads.output(head)] = (model.vocab_size, model.hidden_size)
    heads.tensors.check(shapes)
    return heads
