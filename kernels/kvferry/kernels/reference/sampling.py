"""Reference sampling in plain torch: logit adjustments, draws and log-probabilities.

The definition is the same as in `engine/execute/run/sampler.py`, over tensors: all computations in float64, kept tokens
ordered by weight with the lowest id first on ties, and one uniform number per row, keyed by (seed, stream, position).
"""

import torch

from kvferry.core.philox import uniform
from kvferry.kernels.logit_rows import Adjustments, Draws, TokenLists


def adjust_logits(logits: torch.Tensor, adjustments: Adjustments) -> torch.Tensor:
    out = logits.double()
    if adjustments.bias is not None:
        row, token = _entries(adjustments.bias)
        out[row, token] += adjustments.bias.values
    if adjustments.seen is not None:
        row, token = _entries(adjustments.seen)
        given, penalty = out[row, token], adjustments.seen.values
        out[row, token] = torch.where(given > 0, given / penalty, given * penalty)
    if adjustments.generated is not None:
        row, token = _entries(adjustments.generated)
        out[row, token] -= adjustments.generated.values
    if adjustments.banned is not None:
        out[_entries(adjustments.banned)] = -torch.inf
    if adjustments.allowed is not None:
        tokens = torch.arange(out.shape[1], device=out.device)
        known = tokens < 32 * adjustments.allowed.shape[1]
        word = adjustments.allowed[:, torch.where(known, tokens // 32, 0)]
        out.masked_fill_(~(known & ((word >> (tokens % 32)) & 1).bool()), -torch.inf)
    return out


def _entries(lists: TokenLists) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row indices and token ids of all entries."""
    starts = lists.starts.long()
    rows = torch.arange(len(starts) - 1, device=starts.device)
    return rows.repeat_interleave(starts.diff()), lists.ids.long()


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    tokens = [_draw(logits[row].double(), draws, row) for row in range(len(logits))]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _draw(logits: torch.Tensor, draws: Draws, row: int) -> int:
    temperature, top_k = float(draws.temperature[row]), int(draws.top_k[row])
    top_p, min_p = float(draws.top_p[row]), float(draws.min_p[row])
    if temperature == 0.0:
        return int(logits.argmax())  # the lowest id on a tie, as torch guarantees
    weights, ids = torch.sort(torch.exp((logits - logits.max()) / temperature), descending=True, stable=True)
    kept = weights[:top_k] if top_k else weights
    if top_p < 1.0:
        sums = kept.cumsum(0)
        kept = kept[: int((sums < top_p * sums[-1]).sum()) + 1]
    kept = kept[: max(int((kept >= min_p * weights[0]).sum()), 1)]
    sums = kept.cumsum(0)
    u = uniform(int(draws.seed[row]), int(draws.stream[row]), int(draws.position[row]))
    past = int((sums <= u * sums[-1]).sum())
    return int(ids[min(past, len(kept) - 1)])  # only rounding can make u * sum reach the sum


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    wide = logits.double()
    return wide.gather(1, tokens[:, None]).squeeze(1) - torch.logsumexp(wide, dim=1)
