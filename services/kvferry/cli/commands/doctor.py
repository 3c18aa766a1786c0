"""`kvferry doctor`: capabilities of this machine, and the prompt length above which loading KV is faster than computing
it."""

import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvferry.cli.amounts import counted, duration_of
from kvferry.cli.engine_settings import engine_settings
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.operator_settings import CLUSTER
from kvferry.cli.options import EXIT_FAILED, Values, print_json, with_settings
from kvferry.core.clock import SystemClock
from kvferry.core.settings.processes import DOCTOR

if TYPE_CHECKING:
    from kvferry.bench.doctor import MeasuredSource


@click.command("doctor", cls=SettingsCommand)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--cluster", is_flag=True, help="Inspect a Kubernetes cluster instead of this machine.")
@with_settings((*DOCTOR, *CLUSTER))
def command(values: Values, *, as_json: bool, cluster: bool) -> None:
    """Inspect and measure this machine: cores, instruction sets, memory, GPU, NIXL. With --cluster, inspect a cluster.

    \b
      kvferry doctor
      kvferry doctor --tier "dram://?size=1GiB" --tier "disk:///var/cache/kvferry?size=4GiB"
      kvferry doctor --tier redis://10.0.0.5:6379/0 --json
      kvferry doctor --cluster --lease-namespace kvferry

    The last column is the break-even prompt length: KV of shorter prompts is computed, KV of longer prompts is loaded.
    It needs no configuration; workers measure it for their own links and load.
    """
    if cluster:
        _cluster(values, as_json)
        return
    from kvferry.bench import doctor
    from kvferry.engine.offline.llm import LLM
    from kvferry.kv.pricing.price import PriceBook
    from kvferry.kv.tiers.registry import check_tiers

    check_tiers(values["tier"])
    clock = SystemClock()

    def say(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"  {text} ...", err=True)

    say("inspecting this machine")
    findings = [*doctor.machine(), doctor.copy_rate(clock)]
    say("loading the model and computing prompts")
    llm = LLM.of(engine_settings(values, device="cpu", kv_memory=256 << 20))
    prices = PriceBook()
    findings.append(doctor.teach_compute(llm, prices, clock))
    block_tokens = llm.engine.allocator.block_tokens
    block_bytes = llm.token_bytes * block_tokens  # the size of a worker's pages, which have all layers
    say("measuring the transports")
    sources = doctor.transports(block_bytes, block_tokens, prices, clock)
    say("measuring the tiers")
    object_tokens = values["tier_object_tokens"]
    object_bytes = object_tokens // block_tokens * block_bytes
    sources += doctor.tiers(values["tier"], object_bytes, object_tokens, prices, clock)
    if as_json:
        found = {f.name.replace(" ", "_").replace("-", "_"): f.value if f.data is None else f.data for f in findings}
        print_json({"machine": found, "sources": [asdict(s) for s in sources]})
        return
    for finding in findings:
        click.echo(f"{finding.name:<14} {finding.value}")
    click.echo(f"\n{'KV from':<20} {'round trip':>12} {'rate':>12}   break-even")
    for source in sources:
        click.echo(_line(source))


def _cluster(values: Values, as_json: bool) -> None:
    from kvferry.operator.api import KubeApi
    from kvferry.operator.process.checkup import check_cluster
    from kvferry.operator.process.leader import leader_of, leaders_of

    api = KubeApi.connect(values["kubeconfig"])
    if place := values["lease_namespace"]:
        holder = asyncio.run(leader_of(api, place, values["timeout"]))
        leaders = {} if holder is None else {place: holder}
    else:
        leaders = asyncio.run(leaders_of(api, values["timeout"]))
    findings = check_cluster(api, leaders)
    if as_json:
        print_json({"cluster": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            click.echo(f"{finding.verdict:<5} {finding.about:<24} {finding.detail}")
    if any(finding.verdict == "bad" for finding in findings):
        raise SystemExit(EXIT_FAILED)


def _line(source: "MeasuredSource") -> str:
    if source.note:
        return f"{source.name:<20} {source.note}"
    wins = "never" if source.break_even_tokens is None else counted(source.break_even_tokens, "token")
    return f"{source.name:<20} {duration_of(source.trip_ms):>12} {source.gbps:>7.2f} GB/s   {wins}"
