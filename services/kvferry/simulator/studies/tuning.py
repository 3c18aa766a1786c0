"""Search for the settings of a fleet with the highest goodput: one field at a time, with a simulation for each value.

    best <- the fleet as it is
    repeat: for each field, for the values next to the best one: simulate; keep the best if it gains enough
    until a whole round changes nothing, or the simulations are used up

Fields interact (a larger chunk needs a larger budget), so rounds are repeated. A change that gains less than `MIN_GAIN`
is not made: with another workload, it would be noise.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.engine.schedule.policies.policy import POLICIES as SCHEDULING
from kvferry.gateway.decide.config import POLICIES
from kvferry.simulator.files.spec import FleetSpec
from kvferry.simulator.fleet.fleet import PoolResult
from kvferry.simulator.fleet.members import DECODE, PREFILL

MIN_GAIN = 0.01
"""Minimum relative gain for a change."""
ENGINE_FIELDS: Mapping[str, tuple[int, ...]] = {
    "max_mixed_tokens": (32, 64, 128, 256, 512, 1024, 2048),
    "max_chunk_tokens": (64, 128, 256, 512, 1024, 2048, 4096),
    "token_budget": (256, 512, 1024, 2048, 4096, 8192),
    "max_num_seqs": (4, 8, 16, 32, 64, 128, 256),
}
"""Fields of `SchedulerLimits` with the values to try, ascending."""
SPLIT = "prefill:decode"
GOODPUT, SPEED = "goodput", "speed"
"""Quantities of scores: requests per second within the latency targets, and requests per second of mean time."""
_SKIPS = (0, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True, order=True)
class StudyScore:
    """Score of a simulation; larger is better."""

    goodput: float
    """Requests per second within the latency targets."""
    speed: float
    """Inverse of the mean time of a whole request; decides between fleets with nearly equal goodput."""

    @classmethod
    def of(cls, result: PoolResult) -> "StudyScore":
        """Return the score of a result."""
        mean = result.measures.e2e.mean
        return cls(result.measures.goodput, 1.0 / mean if mean else 0.0)

    def gain_over(self, other: "StudyScore") -> float:
        """Return the relative gain in goodput, or in speed if goodput differs by less than `MIN_GAIN`."""
        if self.gains_in(other) == SPEED:
            return self.speed / other.speed - 1.0
        return self._goodput_gain(other)

    def gains_in(self, other: "StudyScore") -> str:
        """Return the quantity of `gain_over`: `goodput`, or `speed` if goodput differs by less than `MIN_GAIN`."""
        return GOODPUT if abs(self._goodput_gain(other)) >= MIN_GAIN or not other.speed else SPEED

    def _goodput_gain(self, other: "StudyScore") -> float:
        return self.goodput / other.goodput - 1.0 if other.goodput else float(self.goodput > 0.0)


@dataclass(frozen=True, slots=True)
class Change:
    """A change that was made."""

    name: str
    before: str
    after: str
    gain: float
    """Relative gain over the fleet before the change."""
    quantity: str
    """What gained, `goodput` or `speed`."""


@dataclass(slots=True)
class Tuned:
    """The result of a search."""

    spec: FleetSpec
    base: StudyScore
    score: StudyScore
    changes: list[Change] = field(default_factory=list)
    simulations: int = 1
    tried: list[tuple[FleetSpec, StudyScore]] = field(default_factory=list)
    """Every fleet that was simulated; the first one is the file's."""

    def best(self, count: int) -> list[tuple[FleetSpec, StudyScore]]:
        """Return the file's fleet and the `count` best other fleets, best first."""
        others = sorted(self.tried[1:], key=lambda one: one[1], reverse=True)
        return [*self.tried[:1], *others[:count]]


Simulate = Callable[[FleetSpec], StudyScore]


def tune(
    spec: FleetSpec, simulate: Simulate, *, max_simulations: int, on_try: Callable[[str], None] = lambda _: None
) -> Tuned:
    """Search for better settings.

    Args:
        spec: the fleet to improve.
        simulate: returns the score of a fleet.
        max_simulations: maximum number of simulations.
        on_try: called with the name and the value of each simulation.
    """
    base = simulate(spec)
    found = Tuned(spec, base, base, tried=[(spec, base)])
    while True:
        is_changed = False
        for name in _names(spec):
            is_changed |= _improve(found, name, simulate, max_simulations, on_try)
        if not is_changed or found.simulations >= max_simulations:
            return found


def _improve(found: Tuned, name: str, simulate: Simulate, max_simulations: int, on_try: Callable[[str], None]) -> bool:
    """Try the neighbors of a field's value, and continue in the direction of a gain; return whether the field was
    changed."""
    is_changed = False
    tried = {_value(found.spec, name)}
    while found.simulations < max_simulations:
        best: tuple[float, str, FleetSpec, StudyScore] | None = None
        for value, spec in _neighbours(found.spec, name):
            if value in tried or found.simulations >= max_simulations:
                continue
            tried.add(value)
            on_try(f"{name} = {value}")
            score = simulate(spec)
            found.simulations += 1
            found.tried.append((spec, score))
            gain = score.gain_over(found.score)
            if gain >= MIN_GAIN and (best is None or gain > best[0]):
                best = gain, value, spec, score
        if best is None:
            return is_changed
        gain, value, spec, score = best
        found.changes.append(Change(name, _value(found.spec, name), value, gain, score.gains_in(found.score)))
        found.spec, found.score, is_changed = spec, score, True
    return is_changed


def _names(spec: FleetSpec) -> list[str]:
    roles = {role.role for role in spec.pool.roles}
    is_split = {PREFILL, DECODE} <= roles
    split = [SPLIT, "gateway.skip_prefill_below_tokens"] if is_split else []
    return ["gateway.policy", *split, *(f"engine.{name}" for name in ENGINE_FIELDS), "engine.scheduling"]


def _value(spec: FleetSpec, name: str) -> str:
    table, _, field_name = name.partition(".")
    if name == SPLIT:
        return ":".join(str(_role(spec, role).replicas) for role in (PREFILL, DECODE))
    if table == "gateway":
        return str(getattr(spec.pool.gateway.routing, field_name))
    return str(getattr(spec.pool.roles[0].engine.limits, field_name))


def _neighbours(spec: FleetSpec, name: str) -> Iterator[tuple[str, FleetSpec]]:
    """Yield the values next to the present value, with their fleets."""
    table, _, field_name = name.partition(".")
    if name == SPLIT:
        prefill, decode = _role(spec, PREFILL).replicas, _role(spec, DECODE).replicas
        for step in (-1, 1):
            if prefill + step > 0 and decode - step > 0:
                sizes = {PREFILL: prefill + step, DECODE: decode - step}
                roles = tuple(replace(role, replicas=sizes.get(role.role, role.replicas)) for role in spec.pool.roles)
                yield f"{sizes[PREFILL]}:{sizes[DECODE]}", replace(spec, pool=replace(spec.pool, roles=roles))
    elif table == "gateway":
        choices: tuple[Any, ...] = POLICIES if field_name == "policy" else _SKIPS
        for value in choices if field_name == "policy" else _beside(_SKIPS, int(_value(spec, name))):
            changed: dict[str, Any] = {field_name: value}
            routing = replace(spec.pool.gateway.routing, **changed)
            gateway = replace(spec.pool.gateway, routing=routing)
            yield str(value), replace(spec, pool=replace(spec.pool, gateway=gateway))
    else:
        has_weights = bool(spec.pool.roles[0].engine.limits.class_weights)  # weights rule out the other policies
        values: tuple[Any, ...] = () if has_weights else tuple(SCHEDULING)
        if field_name in ENGINE_FIELDS:
            values = _beside(ENGINE_FIELDS[field_name], int(_value(spec, name)))
        for value in values:
            yield str(value), _with_limit(spec, field_name, value)


def _beside(values: tuple[int, ...], present: int) -> tuple[int, ...]:
    below = [value for value in values if value < present][-1:]
    above = [value for value in values if value > present][:1]
    return (*below, *above)


def _with_limit(spec: FleetSpec, name: str, value: Any) -> FleetSpec:
    changed: dict[str, Any] = {name: value}
    roles = tuple(
        replace(role, engine=replace(role.engine, limits=replace(role.engine.limits, **changed)))
        for role in spec.pool.roles
    )
    return replace(spec, pool=replace(spec.pool, roles=roles))


def _role(spec: FleetSpec, name: str) -> Any:
    return next(role for role in spec.pool.roles if role.role == name)


def differences(base: FleetSpec, spec: FleetSpec) -> dict[str, str]:
    """Return the fields in which a fleet differs from the file's, with their values."""
    return {name: _value(spec, name) for name in _names(base) if _value(spec, name) != _value(base, name)}


def fields_of(base: FleetSpec, spec: FleetSpec) -> str:
    """Return the fields in which a fleet differs from the file's, as the tables of a fleet file."""
    by_table: dict[str, list[str]] = {}
    for name, value in differences(base, spec).items():
        table, _, field_name = name.partition(".")
        if name == SPLIT:
            prefill, decode = value.split(":")
            by_table["# role"] = [f"# prefill: replicas = {prefill}", f"# decode: replicas = {decode}"]
        else:
            by_table.setdefault(table, []).append(f"{field_name} = {value if value.isdigit() else repr(value)}")
    return "\n".join(
        line
        for table, lines in by_table.items()
        for line in ([*lines, ""] if table.startswith("#") else [f"[{table}]", *lines, ""])
    ).replace("'", '"')
