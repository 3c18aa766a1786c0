"""Converts a GGUF header to the fields of a config.json, which the model families read."""

from collections.abc import Callable, Mapping
from pathlib import Path

from kvferry.core.errors import ModelFileError
from kvferry.weights.checkpoints.gguf.architectures import ARCHITECTURES, Architecture, Fields, Read
from kvferry.weights.checkpoints.gguf.header import Array, Header, Value
from kvferry.weights.checkpoints.gguf.header_fields import HeaderFields
from kvferry.weights.checkpoints.gguf.tensor_views import LONG_FACTORS, SHORT_FACTORS

Vector = Callable[[str], list[float]]
"""Function that reads a vector of the file by name."""


def architecture_of(header: Header, path: Path) -> Architecture:
    """Return the architecture of a file.

    Raises:
        ModelFileError: it is not supported; the message lists all architectures.
    """
    name = header.pairs.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: general.architecture = {repr(name)[:40]} is not one of {', '.join(ARCHITECTURES)}; other families"
            " are read from safetensors folders"
        )
    return ARCHITECTURES[name]


def config_fields(header: Header, architecture: Architecture, path: Path, vector: Vector) -> Fields:
    """Return the header as fields of a config.json.

    Args:
        header: the header.
        architecture: its architecture.
        path: the file, for messages.
        vector: reads the divisors of rotary frequencies, which are tensors of the file.

    Raises:
        ModelFileError: a key is missing, is not supported, or has a value that is out of range.
    """
    fields = HeaderFields(header, architecture.name, path)
    own = architecture.read(fields)
    if "intermediate_size" in own:
        fields.ignore("feed_forward_length")
    else:
        own["intermediate_size"] = fields.whole("feed_forward_length")
    found: Fields = {
        **own,
        **({} if "kv_lora_rank" in own else _heads(fields, may_rotate_part=not architecture.has_pairs)),
        "vocab_size": _vocab_size(header.pairs, fields),
        "hidden_size": fields.whole("embedding_length"),
        "num_attention_heads": fields.whole("attention.head_count"),
        "num_hidden_layers": fields.whole("block_count"),
        "max_position_embeddings": fields.whole("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(fields, header, architecture.read_yarn, vector),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": sorted(_end_tokens(header.pairs, architecture)),
        "bos_token_id": min(_token_ids(header.pairs, "bos"), default=None),
    }
    fields.refuse_unread()
    return found


def _heads(fields: HeaderFields, *, may_rotate_part: bool) -> Fields:
    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    if fields.value("attention.key_length") is None and hidden % heads:
        raise ModelFileError(f"{fields.where}: hidden size {hidden} is not divisible by {heads} heads")
    head_dim = fields.whole("attention.key_length", hidden // heads)
    rotated = fields.whole("rope.dimension_count", head_dim)
    if fields.whole("attention.value_length", head_dim) != head_dim:
        fields.refuse("attention.value_length", f"it must be the head size {head_dim}")
    if rotated != head_dim and not may_rotate_part:
        fields.refuse("rope.dimension_count", f"it must be the head size {head_dim}")
    return {
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": rotated / head_dim,
    }


def _vocab_size(pairs: Mapping[str, Value], fields: HeaderFields) -> int:
    tokens = pairs.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, Array) else 0
    declared = fields.whole("vocab_size", num_tokens or None)
    if num_tokens and declared != num_tokens:
        fields.refuse("vocab_size", f"{num_tokens} tokens are listed")
    return declared


def _scaling(fields: HeaderFields, header: Header, read_yarn: Read, vector: Vector) -> Fields | None:
    """Return `rope_scaling`; `None` without a scaling."""
    kind = fields.value("rope.scaling.type")
    if LONG_FACTORS in header.tensors:
        original = fields.whole("rope.scaling.original_context_length")
        found: Fields = {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "long_factor": vector(LONG_FACTORS),
            "short_factor": vector(SHORT_FACTORS),
        }
        factor = fields.optional_real("rope.scaling.attn_factor")
        return found | ({} if factor is None else {"attention_factor": factor})
    if kind in (None, "none"):
        fields.ignore(*(f"rope.scaling.{key}" for key in ("factor", "original_context_length", "attn_factor")))
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.real("rope.scaling.factor")}
    if kind != "yarn":
        fields.refuse("rope.scaling.type", "supported scalings are linear, yarn, and longrope with its factors")
    scaling: Fields = {
        "rope_type": "yarn",
        "factor": fields.real("rope.scaling.factor"),
        "original_max_position_embeddings": fields.whole("rope.scaling.original_context_length"),
    }
    for key, ours in (("attn_factor", "attention_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        value = fields.optional_real(f"rope.scaling.yarn_{key}")
        if value is not None:
            scaling[ours] = value
    return scaling | read_yarn(fields)


def _end_tokens(pairs: Mapping[str, Value], architecture: Architecture) -> set[int]:
    tokens = pairs.get("tokenizer.ggml.tokens")
    if architecture.end_tokens and isinstance(tokens, Array):
        try:
            listed = tokens.strings()
        except UnicodeDecodeError:  # the tokenizer reports it
            listed = []
        if architecture.end_tokens[0] in listed:
            return {token_id for token_id, token in enumerate(listed) if token in architecture.end_tokens}
    return _token_ids(pairs, "eos", "eot", "eom")


def _token_ids(pairs: Mapping[str, Value], *names: str) -> set[int]:
    found = (pairs.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return {value for value in found if isinstance(value, int) and not isinstance(value, bool)}
