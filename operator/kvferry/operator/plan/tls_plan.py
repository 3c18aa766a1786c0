"""Managed TLS of a pool: when the operator generates a CA, signs certificates with it, and removes the earlier CA.
Pure.

    publish   a new CA is added to the bundle that all pods trust
    wait      until kubelet has updated the bundle in all pods
    issue     the new CA signs the certificates in the Secret, and its private key is discarded
    wait      until kubelet has updated the certificates in all pods
    retire    the earlier CAs are removed from the bundle

Pods of any two neighboring stages trust each other, so the order in which pods are updated does not matter. The
private key of a CA exists only in the memory of the operator between `publish` and `issue`; an operator that is
restarted between them publishes another CA.
"""

from kvferry.operator.objects.pool_tls import tls_config, tls_secret
from kvferry.operator.plan.actions import Action, WriteTls
from kvferry.operator.plan.context import PlanContext
from kvferry.operator.pool.tls_state import TlsState

SPREAD_SECONDS = 180.0
"""Time in seconds after which changed files have reached all pods: kubelet updates them within about two minutes."""
VALID_DAYS = 90.0
"""Validity of CAs and certificates in days."""
RENEW_SECONDS = 30 * 86_400.0
"""Validity left, in seconds, at which certificates are renewed."""


def plan_tls(ctx: PlanContext) -> tuple[Action, ...]:
    """Plan the next stage; no actions unless `spec.tls.mode` is Managed."""
    pool, memory, now = ctx.pool, ctx.memory, ctx.wall
    if pool.spec.tls.mode != "Managed":
        return ()
    state = state_of(ctx)
    is_first = not state.issuer and not ctx.facts.deployments  # no pod can have earlier files
    has_spread = now - state.published_at >= SPREAD_SECONDS
    draws = not memory.holds_ca and needs_certificates(ctx, state)
    issues = is_first or (memory.holds_ca and has_spread)
    if draws or (memory.holds_ca and issues):
        return (WriteTls(tls_config(pool, state), tls_secret(pool), state, draws, issues, VALID_DAYS),)
    if len(state.bundle) > 1 and not memory.holds_ca and now - state.issued_at >= SPREAD_SECONDS:
        state = state.without_earlier()
    return ctx.apply_if_changed(tls_config(pool, state))


def needs_certificates(ctx: PlanContext, state: TlsState) -> bool:
    """Return whether the Secret needs new certificates: it is missing, it has none, or they expire soon."""
    return not state.issuer or ctx.facts.is_without_tls or state.not_after - ctx.wall <= RENEW_SECONDS


def state_of(ctx: PlanContext) -> TlsState:
    """Return the pool's state: as this operator wrote it, or, after a restart, as the operator finds it."""
    return ctx.memory.tls or ctx.facts.tls or TlsState()
