"""`kvferry pull`: fetches a model, like `kvferry model fetch`."""

import click

from kvferry.cli.commands.model import fetch_and_report


@click.command("pull")
@click.argument("name")
def command(name: str) -> None:
    """Download a model, unless it is cached, and verify its files.

    \b
      kvferry pull Qwen/Qwen3-0.6B
      kvferry pull Qwen/Qwen3-0.6B@main                 a branch, a tag or a commit
      kvferry pull Qwen/Qwen3-0.6B-GGUF:Q8_0            the GGUF file of a quantization
      HF_TOKEN=... kvferry pull meta-llama/Llama-3.2-1B-Instruct

    Models of the Hugging Face Hub are kept in the cache of huggingface_hub. HF_HOME, HF_HUB_CACHE, HF_ENDPOINT,
    HF_TOKEN and HF_HUB_OFFLINE apply.
    """
    fetch_and_report(name)
