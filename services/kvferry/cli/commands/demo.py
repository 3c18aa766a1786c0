"""`kvferry demo`: sends one request through prefill, hand-off and decode; prints the text and a timeline."""

import asyncio
import sys
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import click

from kvferry.cli.commands.up import stack_config
from kvferry.cli.engine_settings import engine_settings
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import EXIT_FAILED, Values, print_json, with_settings
from kvferry.cli.timeline import timeline
from kvferry.client import AsyncClient
from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import InvariantBroken
from kvferry.core.inference.chunks import Timing, Usage
from kvferry.core.process.cores import usable_cores
from kvferry.core.sampling import SamplingParams
from kvferry.core.settings import processes as settings
from kvferry.stack.local_stack import LocalStack
from kvferry.stack.plan.processes import StackConfig

DEFAULT_PROMPT = "Explain what photosynthesis is in two sentences."
_REQUEST_SECONDS = 300.0
_STOP_SECONDS = 10.0


@dataclass(slots=True)
class DemoResult:
    """Output, timing and verification result of a demo request."""

    prompt_token_ids: list[int]
    startup_seconds: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage: Usage | None = None
    timing: Timing | None = None
    ttft_seconds: float = 0.0
    total_seconds: float = 0.0
    tokens_equal: bool | None = None

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens per second after the first token, measured by the client."""
        span = self.total_seconds - self.ttft_seconds
        return (len(self.token_ids) - 1) / span if span > 0 and len(self.token_ids) > 1 else 0.0

    def as_json(self) -> dict[str, object]:
        """Return the JSON object that `--json` prints."""
        timing = self.timing or Timing()
        return {
            "text": self.text,
            "tokens_equal": self.tokens_equal,
            "prompt_tokens": len(self.prompt_token_ids),
            "output_tokens": len(self.token_ids),
            "ttft_ms": round(1e3 * self.ttft_seconds, 2),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 2),
            "handoff": {
                "connector": timing.connector,
                "outcome": timing.handoff_outcome,
                "blocks": timing.handoff_blocks,
                "bytes": timing.handoff_bytes,
                "ms": round(1e3 * timing.handoff_seconds, 3),
            },
            "startup_seconds": round(self.startup_seconds, 2),
        }


@click.command("demo", cls=SettingsCommand)
@click.option("--prompt", default=DEFAULT_PROMPT, help="User message to send.")
@click.option("--max-tokens", default=96, type=click.IntRange(1, 4096), help="Maximum number of tokens to generate.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@with_settings(settings.STACK)
def command(values: Values, *, prompt: str, max_tokens: int, as_json: bool) -> None:
    """Start a gateway, a prefill and a decode worker, send one streaming chat request, print a timeline, and compare
    the tokens with the output of a single aggregated engine.

    \b
      kvferry demo
      kvferry demo --connector nixl --prompt "Why is the sky blue?" --max-tokens 64
      kvferry demo --json | tail -n 1
    """
    if not prompt.strip():
        raise click.UsageError("--prompt is empty; pass a non-empty string")
    config = stack_config(values, http="127.0.0.1:0", grpc="127.0.0.1:0", admin="127.0.0.1:0")
    # Always load: recomputing a short prompt may be cheaper, but the demo shows a hand-off.
    if not values.is_given("load_policy"):
        config = replace(config, worker_flags=(*config.worker_flags, "--load-policy", "always"))
    result, dtype = asyncio.run(_demonstrate(config, prompt, max_tokens, quiet=as_json))
    if not as_json:
        click.echo()
        click.echo(timeline(result.timing or Timing(), result.usage, result.ttft_seconds, result.total_seconds))
    result.tokens_equal = _same_on_one_engine(values, dtype, result, max_tokens)
    if as_json:
        print_json(result.as_json())
    else:
        click.echo(
            f"\na single aggregated engine generates {'the same tokens' if result.tokens_equal else 'DIFFERENT TOKENS'}"
        )
        click.echo(f"the stack was ready after {result.startup_seconds:.1f} s; compute type {dtype}")
    if not result.tokens_equal:
        raise SystemExit(EXIT_FAILED)


async def _demonstrate(config: StackConfig, prompt: str, max_tokens: int, *, quiet: bool) -> tuple[DemoResult, str]:
    clock: Clock = SystemClock()
    begun = clock.monotonic()
    talks = sys.stderr.isatty() and not quiet

    def say(text: str) -> None:
        if talks:
            click.echo(f"  {clock.monotonic() - begun:5.1f} s  {text}", err=True)

    stack = LocalStack(config, clock=clock, on_progress=say)
    try:
        addresses = await stack.start()
        startup = clock.monotonic() - begun
        messages = [{"role": "user", "content": prompt}]
        async with AsyncClient(addresses.grpc, timeout=_REQUEST_SECONDS) as client:
            result = DemoResult(await client.tokenize(messages), startup)
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            if not quiet:
                click.echo(f"> {prompt}\n")
            await _ask(client, messages, sampling, result, clock, quiet=quiet)
        return result, stack.dtype
    finally:
        await stack.stop(_STOP_SECONDS)


async def _ask(
    client: AsyncClient,
    messages: list[dict[str, str]],
    sampling: SamplingParams,
    result: DemoResult,
    clock: Clock,
    *,
    quiet: bool,
) -> None:
    sent = clock.monotonic()
    async with aclosing(client.generate(messages, sampling)) as chunks:
        async for chunk in chunks:
            if chunk.tokens and not result.token_ids:
                result.ttft_seconds = clock.monotonic() - sent
            result.text += chunk.text
            result.token_ids += [t.token_id for t in chunk.tokens]
            if chunk.finish_reason is not None:
                result.usage, result.timing = chunk.usage, chunk.timing
            if not quiet:
                click.echo(chunk.text, nl=False)
                sys.stdout.flush()
    result.total_seconds = clock.monotonic() - sent
    if not quiet:
        click.echo()


def _same_on_one_engine(values: Values, dtype: str, result: DemoResult, max_tokens: int) -> bool:
    """Return whether a single aggregated engine generates the same tokens."""
    from kvferry.engine import LLM

    if not result.token_ids:
        raise InvariantBroken("the stack's response has no tokens")
    # Workers compute on the CPU.
    llm = LLM.of(engine_settings(values, device="cpu", dtype=dtype, kv_memory=256 << 20, threads=usable_cores()))
    (alone,) = llm.generate([result.prompt_token_ids], SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return list(alone.token_ids) == result.token_ids
