"""kvferry in its own environment: the engine without a server, driven step by step.

Compiled kernels, two threads, KV in bfloat16 (1 GiB), the engine's own limits. Nothing is detokenised.
"""

from arrivals import Arrivals

from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.offline.llm import LLM
from kvferry.engine.schedule.messages import EngineRequest


def start(settings):
    llm = LLM(
        settings["model"],
        dtype="auto",
        weights=settings.get("weights", "shipped"),
        numerics=settings.get("numerics", "exact"),
        kernels="auto",
        threads=settings["threads"],
        kv_memory=1 << 30,
    )
    engine = llm.engine
    count = 0

    def serve(requests):
        nonlocal count
        first = count
        count += len(requests)
        arrivals = Arrivals(requests)
        while not arrivals.are_all_here or engine.has_work:
            for number, request in arrivals.due():
                params = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True)
                engine.add(EngineRequest(RequestId(str(first + number)), request["tokens"], params))
            if not engine.has_work:
                arrivals.rest()
                continue
            for update in engine.step().updates:
                for _ in update.tokens:
                    arrivals.drew(int(update.request_id) - first)
        return arrivals.outcome()

    return serve, {"version": "this tree", "dtype": llm.dtype}
