"""Runs a serving benchmark in an open loop: each request is sent at its arrival time, at any load."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.bench.serving.http_client import CompletionClient, Target
from kvferry.bench.workload.measures import MeasuredAnswer
from kvferry.bench.workload.requests import BenchRequest
from kvferry.core.clock import Clock
from kvferry.core.errors import Unavailable

Progress = Callable[[MeasuredAnswer], None]
_MAX_OPEN = 8192
"""Maximum number of open connections if the caller sets no concurrency."""


async def run(
    requests: Sequence[BenchRequest],
    target: Target,
    clock: Clock,
    *,
    max_concurrency: int | None = None,
    on_answer: Progress = lambda _: None,
) -> tuple[str, list[MeasuredAnswer]]:
    """Send all requests and wait for their answers; return the model's name and the answers, in the order of requests.

    Args:
        requests: the requests in order of arrival.
        target: the server.
        clock: measures times.
        max_concurrency: maximum number of requests in flight; a request that waits for others keeps its arrival time.
        on_answer: called with each answer as it ends.

    Raises:
        Unavailable: the server does not list its models, or rejects the first request, which is not measured.
        UsageError: the target is invalid.
    """
    places = asyncio.Semaphore(max_concurrency or _MAX_OPEN)
    async with CompletionClient(target, clock, max_connections=max_concurrency or _MAX_OPEN) as client:
        await client.find_model()
        trial = await client.complete(BenchRequest(0.0, requests[0].prompt, 1), clock.monotonic())
        if trial.error:
            raise Unavailable(f"the server rejects the first request: {trial.error}")
        began = clock.monotonic()

        async def one(request: BenchRequest) -> MeasuredAnswer:
            await asyncio.sleep(max(0.0, request.at - (clock.monotonic() - began)))
            async with places:
                answer = await client.complete(request, began)
            on_answer(answer)
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
        return client.model, [task.result() for task in tasks]


def common_errors(answers: Sequence[MeasuredAnswer], limit: int = 5) -> list[tuple[str, int]]:
    """Return the most frequent errors with their counts.

    Args:
        answers: the answers of a run.
        limit: maximum number of different errors.
    """
    return Counter(answer.error for answer in answers if answer.error).most_common(limit)
