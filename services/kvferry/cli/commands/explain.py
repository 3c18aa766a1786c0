"""`kvferry explain`: the route, the source of the KV and the timing of an ended request."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import click

from kvferry.cli.amounts import counted, size_of
from kvferry.cli.help_pages import SettingsCommand
from kvferry.cli.options import Values, api_key, print_json, with_settings
from kvferry.cli.server_url import ServerUrl
from kvferry.cli.timeline import timeline
from kvferry.core.causes import CAUSE_HELP
from kvferry.core.errors import InvalidRequest, KvferryError, Unavailable
from kvferry.core.inference.chunks import Timing, Usage
from kvferry.core.settings.processes import CLIENT

_SECONDS = 10.0
_MAX_BYTES = 1 << 20


@click.command("explain", cls=SettingsCommand)
@click.argument("request_id")
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's report as one JSON object.")
@with_settings(CLIENT)
def command(values: Values, *, request_id: str, as_json: bool) -> None:
    """Explain a request that ended recently: its route, the source of its KV, its timing.

    \b
      kvferry explain req-5f0c...                       the id is in the x-request-id header of every response
      KVFERRY_API_KEY=... kvferry explain req-5f0c... --url gateway:8000

    A gateway keeps its last 1,024 requests; each tenant can read only its own.
    """
    found = _ask(ServerUrl.parse(values["url"]), request_id, api_key(values))
    if as_json:
        print_json(found)
        return
    for sample in found["samples"]:
        click.echo("\n".join(report_lines(request_id, sample)))


def report_lines(request_id: str, sample: dict[str, Any]) -> list[str]:
    """Format the report of a sample: route, source of the KV, timing."""
    timing = sample["timing"]
    error = f"  ({sample['error']})" if sample["error"] else ""
    what = (
        f"beam search of {sample['beam_width']} beams" if sample["beam_width"] else f"sample {sample['sample_index']}"
    )
    lines = [f"{request_id}  {what}  {sample['outcome']}{error}"]
    counts = f"{sample['prompt_tokens']} prompt ({sample['cached_tokens']} cached), {sample['output_tokens']} generated"
    lines.append(f"  tokens     {counts}")
    lines += _computed(sample.get("computed", ()))
    for note in _distinct(sample["routes"]):
        home = "" if note["worker"] == note["preferred"] else f", its prefix prefers {note['preferred']}"
        load = f"load {note['load']} of {note['capacity']}" if note["capacity"] else f"load {note['load']}"
        lines.append(
            f"  {note['role']:<9}  {note['worker']}: {note['reason']} by policy {note['policy']}{home}; "
            f"{load}, {counted(note['num_candidates'], 'candidate')}"
        )
        lines += [f"             {_candidate(one)}" for one in note["candidates"]]
        for other in note["others"]:
            workers = " and ".join(filter(None, (other["prefill"], other["decode"])))
            lines.append(
                f"             {other['policy']} would take {workers}: {other['estimated_ms']:.1f} ms estimated"
            )
    for kv in timing["kv"]:
        way = "loaded" if kv["num_chosen"] else "computed"
        why = "forced by the policy or by a measurement" if kv["is_forced"] else "cheaper"
        load, compute = 1e3 * kv["expected_load_seconds"], 1e3 * kv["expected_compute_seconds"]
        tokens = counted(kv["num_chosen"] or kv["num_tokens"], "token")
        lines.append(
            f"  kv         {way} {tokens} from position {kv['first_token']} ({why}); "
            f"expected: {kv['source']} {load:.1f} ms, computing {compute:.1f} ms"
        )
        if kv["num_chosen"]:
            failure = f"; then {kv['failure']}" if kv["failure"] else ""
            took = f"{size_of(kv['bytes_loaded'])} in {1e3 * kv['load_seconds']:.1f} ms"
            lines.append(f"             {counted(kv['blocks_loaded'], 'block')}, {took}{failure}")
    if retention := timing.get("retention"):
        kept = f"{counted(retention['num_tokens'], 'token')} for {retention['seconds']:.0f} s"
        outcome = kept if retention["num_tokens"] else f"nothing: {retention['outcome']}"
        lines.append(f"  retention  keeps {outcome}")
    lines.append(
        f"  time       TTFT {1e3 * timing['first_token_seconds']:.1f} ms (queue "
        f"{1e3 * timing['queue_seconds']:.1f}, prefill {1e3 * timing['prefill_seconds']:.1f}), hand-off "
        f"{timing['handoff_outcome'] or 'none'} {1e3 * timing['handoff_seconds']:.1f} ms, "
        f"decode {1e3 * _decode_seconds(timing):.1f} ms, total {1e3 * timing['total_seconds']:.1f} ms, "
        f"resumed {counted(timing['resumed'], 'time')}"
    )
    usage = Usage(sample["prompt_tokens"], sample["output_tokens"], sample["cached_tokens"])
    drawn = timeline(_timing(timing), usage, timing["first_token_seconds"], timing["total_seconds"])
    return [*lines, "", *(f"  {line}" for line in drawn.splitlines())]


def _computed(computed: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each cause for which tokens of the prompt were computed, the most frequent first."""
    lines = []
    for number, one in enumerate(sorted(computed, key=lambda one: -one["num_tokens"])):
        age = f", {one['seconds']:.0f} s ago" if one["seconds"] else ""
        what = CAUSE_HELP.get(one["cause"], "a cause that this version does not know")
        head = "computed" if not number else ""
        lines.append(f"  {head:<9}  {counted(one['num_tokens'], 'token')}: {one['cause']} ({what}{age})")
    return lines


def _timing(given: dict[str, Any]) -> Timing:
    """Return the timing without the reports on the source of the KV; fields of a newer gateway are ignored."""
    names = {one.name for one in fields(Timing)} - {"kv", "retention"}
    return Timing(**{name: value for name, value in given.items() if name in names})


def _decode_seconds(timing: dict[str, Any]) -> float:
    return float(max(0.0, timing["total_seconds"] - timing["first_token_seconds"] - timing["handoff_seconds"]))


def _distinct(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the notes without repetitions: a worker that was chosen for both parts of a request has two."""
    return [note for index, note in enumerate(notes) if note not in notes[:index]]


def _candidate(one: dict[str, Any]) -> str:
    cached = f"{counted(one['cached_tokens'], 'token')} cached ({_basis(one)})"
    return f"{one['worker']}: {cached}, load {one['load']}{_terms(one['terms_ms'])}"


def _terms(terms_ms: dict[str, float]) -> str:
    if not terms_ms:
        return ""
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in terms_ms.items() if ms)
    return f"; {sum(terms_ms.values()):.1f} ms estimated ({parts or 'no terms'})"


def _basis(candidate: dict[str, Any]) -> str:
    state = f"its map is {candidate['map_state']}"
    if candidate["basis"] == "exact":
        return state
    if candidate["basis"] == "pending":
        return f"{candidate['confirmed_tokens']} of them reported, the others sent there just now; {state}"
    return f"estimated from requests sent there; {state}"


def _ask(gateway: ServerUrl, request_id: str, api_key: str) -> Any:
    """Fetch a request's report from the gateway.

    Raises:
        InvalidRequest: the gateway has no ended request with this id and tenant.
        Unavailable: the gateway cannot be reached.
    """
    url = f"{gateway}/v1/requests/{urllib.parse.quote(request_id, safe='')}"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  the scheme is HTTP
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310  the scheme is HTTP
            return json.loads(answer.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        raise _refused(gateway, error) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        raise Unavailable(f"the gateway at {gateway} does not answer ({why}); start it, or set --url") from error


def _refused(gateway: ServerUrl, error: urllib.error.HTTPError) -> KvferryError:
    """Return the error for an answer with another status than 200."""
    try:
        return InvalidRequest(str(json.loads(error.read(_MAX_BYTES))["error"]["message"]), field="request_id")
    except (OSError, ValueError, LookupError, TypeError):  # no gateway of this project, such as a proxy
        return Unavailable(f"{gateway} answers with status {error.code}; set --url to the gateway")
