"""Which requests have chains instead of trees. Pure."""

from kvferry.core.sampling import SamplingParams

CONSTRAINT = (
    "a constraint cuts a draft at the tokens that it rejects, and computes one mask after each token of a chain"
)
REJECTION = "the rejection rule is defined for one draft token per position"


def chain_reason(sampling: SamplingParams, *, is_rejecting: bool) -> str | None:
    """Return why a request's drafts are chains; `None` if they can be trees.

    Penalties, bans, `logit_bias`, log-probabilities and several samples need no chain: each row is sampled with the
    tokens of its path, and with the random number of its position.

    Args:
        sampling: the request's parameters.
        is_rejecting: whether the rejection rule accepts the drafts of sampled requests.
    """
    if sampling.constraint is not None:
        return CONSTRAINT
    if is_rejecting and not sampling.is_greedy:
        return REJECTION
    return None
