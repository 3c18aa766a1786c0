"""What serves text, whatever protocol brings the request: a token source, a model's text side, limits, tenants."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from kvferry.core.clock import Clock, SystemClock
from kvferry.rpc import prompts
from kvferry.rpc.text import TextChunk, TextRequest, generate_text
from kvferry.rpc.text_model import TextModel
from kvferry.rpc.token_source import TokenSource


def _one_tenant(_authorization: str | None) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class TextService:
    """One model's text requests, from fitting to chunks. Shared by the gRPC and HTTP edges."""

    source: TokenSource
    model: TextModel
    clock: Clock = field(default_factory=SystemClock)
    context_tokens: Callable[[], int | None] = lambda: None
    """What the workers take now, prompt and output together; `None`: as much as the model does."""
    new_seed: prompts.DrawSeed = prompts.draw_seed
    tenant_of: Callable[[str | None], str] = _one_tenant
    """The tenant for the value of an `authorization` header; raises Unauthenticated."""

    def fit(self, request: TextRequest) -> TextRequest:
        """`request` with definite sampling parameters.

        Raises:
            InvalidRequest: it can never run here.
        """
        limit = self.context_tokens()
        context = self.model.max_model_tokens if limit is None else min(limit, self.model.max_model_tokens)
        sampling = prompts.fit(self.model, request.token_ids, request.sampling, context, self.new_seed)
        return replace(request, sampling=sampling)

    def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """`rpc.text.generate_text` for a request that `fit` returned."""
        return generate_text(self.source, self.model, request, self.clock)
