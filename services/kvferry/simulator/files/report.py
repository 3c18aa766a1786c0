"""Results of a simulation as JSON, as text, and compared with a baseline."""

from collections.abc import Mapping
from typing import Any

from kvferry.simulator.files.spec import FleetSpec
from kvferry.simulator.fleet.fleet import PoolResult, RoleTotals


def as_json(spec: FleetSpec, result: PoolResult) -> dict[str, Any]:
    """Return the JSON object of `kvferry simulate --json`. Times are in milliseconds and in virtual seconds."""
    m = result.measures
    seconds = m.ended_at
    hours = seconds / 3600.0
    price = sum(spec.prices.get(role, 0.0) * totals.replicas for role, totals in result.roles.items()) * hours
    found: dict[str, Any] = {
        "ttft_ms": m.ttft.in_ms(),
        "itl_ms": m.itl.in_ms(),
        "e2e_ms": m.e2e.in_ms(),
        "queue_ms": m.queue.in_ms(),
        "goodput": round(m.goodput, 4),
        "throughput": round(m.completed / seconds, 4) if seconds else 0.0,
        "output_tokens_per_second": round(m.output_tokens / seconds, 2) if seconds else 0.0,
        "normalized_latency_ms": round(1e3 * m.normalized / m.completed, 4) if m.completed else 0.0,
        "hit_rate": round(m.hit_rate, 4),
        "requests": m.completed,
        "refused": m.refused,
        "resumed": m.resumed,
        "preemptions": result.preemptions,
        "seconds_simulated": round(seconds, 3),
        "transfers": {
            "count": result.transfers.transfers,
            "failures": result.transfers.failures,
            "bytes": result.transfers.num_bytes,
            "mean_ms": round(1e3 * result.transfers.seconds / max(1, result.transfers.transfers), 3),
        },
        "retentions": {
            "granted": sum(totals.counts.retained for totals in result.roles.values()),
            "refused": sum(totals.counts.unretained for totals in result.roles.values()),
        },
        "tenants": {
            name: {"requests": one.e2e.count, "ttft_ms": one.ttft.in_ms(), "e2e_ms": one.e2e.in_ms()}
            for name, one in sorted(m.tenants.items())
        },
        "roles": {role: _role(totals, seconds) for role, totals in result.roles.items()},
        "events": result.events,
    }
    if price:
        found["cost_per_million_output_tokens"] = round(1e6 * price / max(1, m.output_tokens), 4)
    return found


def _role(totals: RoleTotals, seconds: float) -> dict[str, float]:
    counts, replicas = totals.counts, max(1, totals.replicas)  # 0 if all workers are lost at the end
    busy = counts.busy_seconds or 1.0
    return {
        "replicas": totals.replicas,
        "utilization": round(counts.busy_seconds / (seconds * replicas), 4) if seconds else 0.0,
        "steps": counts.steps,
        "mean_batch": round(counts.sequence_seconds / busy, 3),
        "kv_usage": round(counts.page_seconds / busy * replicas / totals.pages, 4) if totals.pages else 0.0,
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return a short report."""
    shown = []
    shown.append(
        f"{found['requests']} requests in {found['seconds_simulated']:.1f} simulated seconds: "
        f"{found['throughput']:.2f} requests/s, {found['output_tokens_per_second']:.1f} output tokens/s, "
        f"goodput {found['goodput']:.2f} requests/s"
    )
    for name, title in (
        ("ttft_ms", "TTFT"),
        ("itl_ms", "ITL"),
        ("e2e_ms", "end to end"),
        ("queue_ms", "queue"),
    ):
        cells = "  ".join(f"{p} {value:10.1f}" for p, value in found[name].items())
        shown.append(f"  {title:<12} {cells} ms")
    shown.append(
        f"  prefix hits {found['hit_rate']:.1%}, {found['preemptions']} preemptions, {found['refused']} refused, "
        f"{found['resumed']} resumed, {found['transfers']['count']} transfers"
    )
    if any(found["retentions"].values()):
        granted, refused = found["retentions"]["granted"], found["retentions"]["refused"]
        shown.append(f"  prompts kept {granted} retentions granted, {refused} refused")
    for name, one in found["tenants"].items() if len(found["tenants"]) > 1 else ():
        shown.append(
            f"  tenant {name or '(none)':<12} {one['requests']} requests, TTFT p50 {one['ttft_ms']['p50']:.1f} ms, p99 "
            f"{one['ttft_ms']['p99']:.1f} ms, end to end p50 {one['e2e_ms']['p50']:.1f} ms"
        )
    for role, totals in found["roles"].items():
        shown.append(
            f"  {role:<12} {totals['replicas']} workers, busy {totals['utilization']:.1%}, "
            f"mean batch {totals['mean_batch']:.1f}, KV in use {totals['kv_usage']:.1%}"
        )
    if "cost_per_million_output_tokens" in found:
        shown.append(
            f"  cost         {found['cost_per_million_output_tokens']:.2f} per million output tokens, "
            "in the currency of price_per_hour"
        )
    return shown


_COMPARED = (
    ("TTFT p50, ms", ("ttft_ms", "p50")),
    ("TTFT p99, ms", ("ttft_ms", "p99")),
    ("ITL p50, ms", ("itl_ms", "p50")),
    ("ITL p99, ms", ("itl_ms", "p99")),
    ("end to end p50, ms", ("e2e_ms", "p50")),
    ("end to end p99, ms", ("e2e_ms", "p99")),
    ("goodput, requests/s", ("goodput",)),
    ("prefix hits", ("hit_rate",)),
)


def comparison(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a table of a baseline and another simulation, with the change in percent."""
    shown = [f"  {'':<22} {'base':>12} {'other':>12} {'change':>9}"]
    for title, path in _COMPARED:
        a, b = _at(base, path), _at(other, path)
        change = f"{100.0 * (b / a - 1.0):+8.1f}%" if a else "        -"
        shown.append(f"  {title:<22} {a:12.3f} {b:12.3f} {change}")
    return shown


def _at(found: Mapping[str, Any], path: tuple[str, ...]) -> float:
    value: Any = found
    for name in path:
        value = value[name]
    return float(value)
