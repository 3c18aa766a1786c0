"""Output of one prompt while it is generated: its text, reasoning and calls, in parts and as a whole."""

from dataclasses import dataclass

from kvferry.core.errors import InvariantBroken
from kvferry.core.sampling import FinishReason, SampledToken, ScoredToken
from kvferry.engine.schedule.messages import EngineRequest
from kvferry.engine.schedule.step.kv_jobs import SequenceUpdate
from kvferry.text.answers.answer import AnswerSplitter
from kvferry.text.answers.pieces import AssembledCalls, CallDelta, Parts, ToolCall
from kvferry.text.requests.output_text import OutputText, StopReason


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion of one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    logprobs: tuple[SampledToken, ...] = ()
    """The sampled tokens with their log-probabilities; empty unless requested."""
    stop_reason: StopReason = None
    """The stop string or stop token id that ended the text; `None` if neither did."""
    prompt_logprobs: tuple[ScoredToken, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second one on; `None` unless requested."""
    reasoning_content: str = ""
    """Reasoning before the answer of a conversation; not part of `text`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls in the answer of a conversation; not part of `text`."""


@dataclass(frozen=True, slots=True)
class CompletionPart:
    """Part of a completion that one step added."""

    text: str
    """Text of complete characters; lags behind `token_ids` while its end may be the start of a stop string."""
    token_ids: tuple[int, ...]
    reasoning_content: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    completion: Completion | None = None
    """The whole completion; only in the last part."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the completion ended; only in the last part."""
        return None if self.completion is None else self.completion.finish_reason


class CompletionStream:
    """Output of one prompt."""

    def __init__(
        self, request: EngineRequest, writer: OutputText | None, splitter: AnswerSplitter | None = None
    ) -> None:
        """
        Args:
            request: the request.
            writer: converts tokens to text; `None` if the model has no tokenizer.
            splitter: splits the text of an answer; `None` if all generated text belongs to `text`.
        """
        self.request = request
        self._writer = writer
        self._splitter = splitter
        self._scores: tuple[ScoredToken, ...] | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls = AssembledCalls()
        self._tokens: list[SampledToken] = []
        self._reason: FinishReason | None = None
        self._stop_reason: StopReason = None
        self._num_cached = 0

    def add(self, update: SequenceUpdate) -> CompletionPart:
        """Add the tokens of a step. The last part has the completion. If the engine would continue the request after
        it, the caller must abort the request."""
        self._num_cached = update.num_cached
        if update.scores is not None:
            self._scores = update.scores
        text, kept, reason = "", update.tokens, update.finish_reason
        if self._writer is not None:
            text, kept, reason, self._stop_reason = self._writer.add(update.tokens, update.finish_reason)
        parts = self._split(text, is_last=reason is not None)
        self._reason = reason
        self._tokens += kept
        self._text.append(parts.content)
        self._reasoning.append(parts.reasoning)
        self._calls.add(parts.calls)
        whole = None if reason is None else self.completion()
        return CompletionPart(parts.content, tuple(t.token_id for t in kept), parts.reasoning, parts.calls, whole)

    def completion(self) -> Completion:
        """Return the whole completion.

        Raises:
            InvariantBroken: the output has not ended.
        """
        if self._reason is None:
            raise InvariantBroken(f"request {self.request.request_id} has not ended")
        return Completion(
            prompt_token_ids=tuple(self.request.token_ids),
            text="".join(self._text),
            token_ids=tuple(t.token_id for t in self._tokens),
            finish_reason=self._reason,
            num_cached_tokens=self._num_cached,
            logprobs=tuple(self._tokens) if self.request.sampling.logprobs is not None else (),
            stop_reason=self._stop_reason,
            prompt_logprobs=self._scores,
            reasoning_content="".join(self._reasoning),
            tool_calls=self._calls.whole(),
        )

    def _split(self, text: str, *, is_last: bool) -> Parts:
        if self._splitter is None:
            return Parts(text)
        parts = self._splitter.feed(text)
        if not is_last:
            return parts
        rest = self._splitter.finish()
        return Parts(parts.content + rest.content, parts.reasoning + rest.reasoning, (*parts.calls, *rest.calls))
