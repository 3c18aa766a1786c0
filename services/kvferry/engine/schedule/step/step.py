"""Step plan and step result: the interface between scheduler and runner.

token_ids   [ p0 p1 p2 p3 | g0 g1 ]     all N tokens so far, prompt then generated
positions     0  1  2  3    4  5
              ^ num_computed = C          KV of positions < C is in the pages
              [=======)                   this step computes positions C .. C+num_scheduled-1
num_sampled   of the last scheduled rows are sampled; 0 unless C + num_scheduled >= N
num_scored    of the scheduled rows of the prompt give the log-probability of the prompt's next token
pooled        rows of the prompt of a pooling request give their hidden states; such a request samples no row

One token per step needs one sampled row. With speculative decoding, `token_ids` ends with draft tokens. Each of them is
scheduled, and each row from the last known token on is sampled:

token_ids   [ p0 p1 p2 p3 g0 | d1 d2 d3 ]   num_computed = 4, num_scheduled = 4, num_sampled = 4
sampled                   t1   t2 t3 t4     t1 is always a token; t2 only if d1 = t1, t3 only if also d2 = t2, ..

A draft token is accepted if it is the token that is sampled at its position, with the random number of that position
(Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, algorithm 1, for a draft without
probabilities whose draws are coupled with the model's). So drafts change the number of steps but no tokens. With
`draft_sources`, that algorithm's rejection rule applies instead (`run.rejection`), and drafts change tokens, but not
their distribution.

With `parents`, the draft tokens are a tree (`schedule.step.draft_tree`): a row's position is that of the root plus the
row's depth, and its KV slot is that of its place in `token_ids`. A token is accepted if it is drawn at its parent's
row. The runner moves the KV of the accepted path behind the root before it returns the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvferry.core.errors import InvariantBroken, KvferryError
from kvferry.core.ids import BlockId, RequestId
from kvferry.core.sampling import SampledToken, SamplingParams, ScoredToken
from kvferry.engine.schedule.step.adapter_slots import NO_SLOT
from kvferry.engine.schedule.step.draft_tree import next_row, path_rows
from kvferry.engine.schedule.step.prompt_pooling import Sums
from kvferry.engine.schedule.step.token_mask import TokenMask

Floats = npt.NDArray[np.float32]


class DraftSource(NamedTuple):
    """Distribution from which a draft token was drawn."""

    ids: npt.NDArray[np.int64]
    """[N] tokens, ascending."""
    probabilities: npt.NDArray[np.float64]
    """[N] probabilities of these tokens, which sum to 1; any other token has probability 0."""


DraftSources = Sequence[DraftSource | None]
"""Distribution of each draft token; `None` for a token that was not drawn, whose probability is 1."""


def is_decode(num_uncomputed: int) -> bool:
    """Return whether a sequence with this number of uncomputed tokens decodes rather than prefills.

    A sequence decodes if a single token remains to be computed: the last sampled token, or the last token of a prompt
    whose other tokens are cached. Budgets, batches and cost estimates treat both alike.
    """
    return num_uncomputed == 1


@dataclass(slots=True)  # not frozen: one is created per sequence and step, and freezing doubles the creation time
class ScheduledSequence:
    """Part of a step that belongs to one sequence. Do not change it. The scheduler owns its lists; do not keep them."""

    request_id: RequestId
    token_ids: Sequence[int]
    """All tokens so far, prompt then generated, then the step's draft tokens."""
    num_prompt: int
    """Number of prompt tokens in `token_ids`; presence and frequency penalties count only the generated tokens."""
    num_computed: int
    num_scheduled: int
    """Number of tokens to compute in this step, at least 1."""
    block_ids: Sequence[BlockId]
    """Pages in order of position, at least for num_computed + num_scheduled tokens."""
    num_sampled: int
    """Number of sampled rows, which are the last of the scheduled rows; 0 if the prefill continues in the next step.
    All but the first have a draft token as input."""
    sampling: SamplingParams
    sample_index: int
    """Index of the sequence among the request's `n` samples; selects the random stream."""
    banned_token_ids: Sequence[int] = ()
    """Tokens banned in this step (end tokens before `min_tokens`)."""
    table_version: int = 0
    """Version of the block table, 0 if unknown; while it is unchanged, blocks were only appended."""
    mask: TokenMask | None = None
    """Mask of the first sampled row, if the sequence has a constraint."""
    draft_masks: Sequence[TokenMask] = ()
    """Masks of the other sampled rows, one after each draft token, if the sequence has a constraint."""
    num_scored: int = 0
    """Number of rows whose logits score the prompt's next token: the last scheduled rows before the prompt's last
    token."""
    pooled_positions: range = range(0)
    """Positions of the scheduled rows whose hidden states are pooled."""
    adapter_slot: int = NO_SLOT
    """Slot of the sequence's adapter (`adapter_slots`); `NO_SLOT` without one."""
    further_ids: Sequence[Sequence[BlockId]] = ()
    """Pages of each further layer group, in order of position like `block_ids`. Entries behind a group's window are
    `NO_PAGE`."""
    num_passed: Sequence[int] = ()
    """Number of leading `NO_PAGE` entries of each group, the first group included; empty if there are none."""
    draft_sources: DraftSources | None = None
    """Distributions of the draft tokens, if the rejection rule applies; with `None`, a draft token is accepted if it
    equals the drawn token."""
    parents: tuple[int, ...] = ()
    """Row of the parent of each token after the root, the last tokens in `token_ids`, if they are a tree; empty for a
    chain. The root is the last token before them."""

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens, which are the last tokens in `token_ids`."""
        return self.num_sampled - 1 if self.num_sampled > 1 else 0

    @property
    def is_decode(self) -> bool:
        """Whether the sequence decodes in this step (see the function `is_decode`), possibly with draft tokens."""
        return is_decode(self.num_scheduled - self.num_drafts)

    @property
    def scored_positions(self) -> range:
        """Positions of the rows that score the next token of the prompt."""
        stop = min(self.num_computed + self.num_scheduled, self.num_prompt - 1)
        return range(stop - self.num_scored, stop)

    @property
    def samples(self) -> bool:
        """Whether any row of the sequence is sampled in this step."""
        return self.num_sampled > 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one step; empty if no sequence can run."""

    scheduled: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, over all sequences."""
        return sum(s.num_scheduled for s in self.scheduled)


Sampled = SampledToken | KvferryError | None
"""Result of sampling one row: its token, the error of its sequence, or `None` if the row's mask was not ready."""


class SequenceOutput(NamedTuple):  # a tuple for speed, since one is created per sequence and step
    """Result of a step for one sampled sequence. C grows by `accepted` and N by the number of tokens, after
    which C = N - 1; see the module's docstring."""

    tokens: tuple[SampledToken, ...]
    """Accepted draft tokens in order of position, then the token sampled after them; not empty."""
    accepted: int
    """Number of leading scheduled tokens that were accepted; the KV of rejected tokens is overwritten later."""
    path: tuple[int, ...] = ()
    """Rows of the accepted draft tokens in a tree, without the root; empty for a chain."""


def check_output(
    item: ScheduledSequence, output: SequenceOutput | None, num_computed: int, num_tokens: int
) -> SequenceOutput:
    """Check that an output matches its part of the step and the counters C and N that the sequence had before the step.

    Args:
        item: the sequence's part of the step.
        output: output of the runner; `None` if it has none.
        num_computed: C, the number of computed tokens before the step.
        num_tokens: N, the number of tokens of the sequence before the step.

    Raises:
        InvariantBroken: an output has no sampled rows, sampled rows have no output, or the numbers of tokens and
            accepted tokens do not lead to C = N - 1.
    """
    if output is None or not item.num_sampled:
        raise InvariantBroken(f"request {item.request_id}: num_sampled={item.num_sampled} but output={output}")
    tokens, accepted = len(output.tokens), output.accepted
    is_bounded = 0 < accepted <= item.num_scheduled and 0 < tokens <= item.num_sampled
    if not is_bounded or num_computed + accepted != num_tokens + tokens - 1:
        raise InvariantBroken(
            f"request {item.request_id}: {tokens} tokens from {item.num_sampled} rows, and {accepted} of"
            f" {item.num_scheduled} scheduled tokens accepted, after C={num_computed} and N={num_tokens}"
        )
    return output


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step: one output per sampled sequence."""

    outputs: Mapping[RequestId, SequenceOutput]
    failures: Mapping[RequestId, KvferryError] = field(default_factory=dict)
    """Errors of the sequences for which no token could be sampled; these sequences must end."""
    postponed: frozenset[RequestId] = frozenset()
    """Sequences whose token was not sampled because their masks were not ready; they must be scheduled again."""
    scores: Mapping[RequestId, tuple[ScoredToken, ...]] = field(default_factory=dict)
    """The scored tokens of each sequence with scored rows, in order of position."""
    pooled: Mapping[RequestId, Sums] = field(default_factory=dict)
    """The sum of the hidden states of each sequence with pooled rows."""
    hidden: Floats | None = None
    """[T, width] float32: hidden states of all scheduled rows that a head reads, in the order of the plan; `None`
    without a head."""

    @classmethod
    def of(
        cls,
        scheduled: Sequence[ScheduledSequence],
        sampled: Sequence[Sampled],
        scored: Mapping[RequestId, tuple[ScoredToken, ...] | KvferryError] | None = None,
    ) -> "StepResult":
        """Build a result. A sequence's rows count up to the first one whose token differs from the draft, whose mask
        was not ready, or which has an error; the sequence fails if its first row, or a row after accepted tokens, has
        an error.

        Args:
            scheduled: the plan's sequences.
            sampled: results of all sampled rows, in the order of the plan, then of position. Rows that do not count
                may have any result.
            scored: results of the scored rows of each sequence that has any.
        """
        outputs: dict[RequestId, SequenceOutput] = {}
        scores: dict[RequestId, tuple[ScoredToken, ...]] = {}
        failures: dict[RequestId, KvferryError] = {}
        postponed: set[RequestId] = set()
        for request_id, result in (scored or {}).items():
            if isinstance(result, KvferryError):
                failures[request_id] = result
            else:
                scores[request_id] = result
        row = 0
        for s in scheduled:
            if s.num_sampled:
                tokens = _verified(s, sampled[row : row + s.num_sampled])
                if isinstance(tokens, KvferryError):
                    failures.setdefault(s.request_id, tokens)
                elif not tokens:
                    postponed.add(s.request_id)
                elif s.request_id not in failures:
                    accepted = s.num_scheduled - s.num_drafts + len(tokens) - 1
                    path = accepted_path(s, sampled[row : row + s.num_sampled]) if s.parents else ()
                    outputs[s.request_id] = SequenceOutput(tokens, accepted, path)
                row += s.num_sampled
        return cls(outputs, failures, frozenset(postponed), scores)


def _verified(s: ScheduledSequence, sampled: Sequence[Sampled]) -> tuple[SampledToken, ...] | KvferryError:
    """Return the tokens of the rows that count; none if the mask of the first row was not ready."""
    tokens: list[SampledToken] = []
    if s.parents:
        for row in (0, *accepted_path(s, sampled)):
            last = sampled[row]
            if not isinstance(last, SampledToken):
                return tuple(tokens) if last is None else last
            tokens.append(last)
        return tuple(tokens)
    for draft, one in zip([*draft_tokens(s), None], sampled, strict=True):
        if isinstance(one, KvferryError):
            return one
        if one is None:
            break
        tokens.append(one)
        if one.token_id != draft:
            break
    return tuple(tokens)


def accepted_path(s: ScheduledSequence, sampled: Sequence[Sampled]) -> tuple[int, ...]:
    """Return the accepted rows of a sequence with a tree, without the root: from the root, to the child whose token is
    the one that was sampled, up to a row without such a child.

    Args:
        s: the sequence.
        sampled: results of its sampled rows; rows that are not on the path may have any result.
    """
    drafts, path, row = draft_tokens(s), list[int](), 0
    while isinstance(one := sampled[row], SampledToken):
        child = next_row(s.parents, drafts, row, one.token_id)
        if child is None:
            break
        path.append(child)
        row = child
    return tuple(path)


def draft_tokens(s: ScheduledSequence) -> Sequence[int]:
    """Return the draft tokens of a sequence in a step."""
    return s.token_ids[len(s.token_ids) - s.num_drafts :]


def sampled_rows(scheduled: Sequence[ScheduledSequence]) -> list[int]:
    """Return the index of each sampled row among the rows with logits: per sequence its scored rows, then its sampled
    rows."""
    rows: list[int] = []
    end = 0
    for s in scheduled:
        end += s.num_scored + s.num_sampled
        rows += range(end - s.num_sampled, end)
    return rows


def drawn_rows(scheduled: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return the scheduled sequence of each sampled row, in the order of rows (`rows_of`)."""
    return [row for s in scheduled if s.num_sampled for row in rows_of(s)]


def rows_of(s: ScheduledSequence) -> Iterator[ScheduledSequence]:
    """Yield the scheduled sequence of each sampled row of a sequence that samples.

    A sequence with several rows is yielded once per row, truncated after the row's token: a draw depends on the tokens
    up to its row, on their number and on the request, but not on later draft tokens.
    """
    if s.num_sampled == 1:
        yield s
        return
    end = s.num_computed + s.num_scheduled - s.num_drafts
    if s.parents:
        drafts = draft_tokens(s)
        for row in range(s.num_sampled):
            own = [drafts[above - 1] for above in path_rows(s.parents, row)]
            tokens, count = FirstTokens(s.token_ids, end, own), end + len(own) - s.num_computed
            yield replace(s, token_ids=tokens, num_scheduled=count, num_sampled=1, parents=())
        return
    masks: tuple[TokenMask | None, ...] = (s.mask, *s.draft_masks) if s.draft_masks else (None,) * s.num_sampled
    for index, mask in enumerate(masks):
        yield replace(
            s,
            token_ids=FirstTokens(s.token_ids, end + index),
            num_scheduled=end + index - s.num_computed,
            num_sampled=1,
            mask=mask,
            draft_masks=(),
        )


class FirstTokens(Sequence[int]):
    """The first tokens of a sequence without a copy, and the tokens of a path."""

    __slots__ = ("_count", "_path", "_tokens")

    def __init__(self, tokens: Sequence[int], count: int, path: Sequence[int] = ()) -> None:
        """
        Args:
            tokens: tokens of the sequence, to which more may be appended.
            count: number of leading tokens, at most as many as there are.
            path: tokens that follow them.
        """
        self._tokens, self._count, self._path = tokens, count, path

    def __len__(self) -> int:
        return self._count + len(self._path)

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice, /) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [*self._tokens[: self._count], *self._path][index]
        place = range(len(self))[index]
        return self._tokens[place] if place < self._count else self._path[place - self._count]

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._tokens, self._count), self._path)
