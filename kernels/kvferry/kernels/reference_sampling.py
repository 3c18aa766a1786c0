"""From logits to tokens in plain torch: the definition of what a device adjusts, draws and reports.

It is the sampler's own definition (`engine/sampler.py`) over tensors: float64 throughout, the kept tokens in the order
of their weights and the lowest id first among equals, one uniform number of (seed, stream, position) for each row.
"""

import torch

from kvferry.core.philox import uniform
from kvferry.kernels.rows_of_logits import Adjustments, Draws, TokenLists


def adjust_logits(logits: torch.Tensor, wishes: Adjustments) -> torch.Tensor:
    out = logits.double()
    if wishes.bias is not None:
        row, token = _entries(wishes.bias)
        out[row, token] += wishes.bias.values
    if wishes.seen is not None:
        row, token = _entries(wishes.seen)
        given, penalty = out[row, token], wishes.seen.values
        out[row, token] = torch.where(given > 0, given / penalty, given * penalty)
    if wishes.generated is not None:
        row, token = _entries(wishes.generated)
        out[row, token] -= wishes.generated.values
    if wishes.banned is not None:
        out[_entries(wishes.banned)] = -torch.inf
    if wishes.allowed is not None:
        tokens = torch.arange(out.shape[1], device=out.device)
        known = tokens < 32 * wishes.allowed.shape[1]
        word = wishes.allowed[:, torch.where(known, tokens // 32, 0)]
        out.masked_fill_(~(known & ((word >> (tokens % 32)) & 1).bool()), -torch.inf)
    return out


def _entries(lists: TokenLists) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, token) of every entry."""
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
        return int(logits.argmax())  # the first among equals, as torch promises
    weights, ids = torch.sort(torch.exp((logits - logits.max()) / temperature), descending=True, stable=True)
    kept = weights[:top_k] if top_k else weights
    if top_p < 1.0:
        sums = kept.cumsum(0)
        kept = kept[: int((sums < top_p * sums[-1]).sum()) + 1]
    kept = kept[: max(int((kept >= min_p * weights[0]).sum()), 1)]
    sums = kept.cumsum(0)
    u = uniform(int(draws.seed[row]), int(draws.stream[row]), int(draws.position[row]))
    past = int((sums <= u * sums[-1]).sum())
    return int(ids[min(past, len(kept) - 1)])  # only rounding brings u * sum up to the sum


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    wide = logits.double()
    return wide.gather(1, tokens[:, None]).squeeze(1) - torch.logsumexp(wide, dim=1)
