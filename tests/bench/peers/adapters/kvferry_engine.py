"""kvferry in its own environment: the engine without any door, driven step by step.

Compiled kernels, two threads, KV in bfloat16 (1 GiB), the engine's own limits. Nothing is detokenised.
"""

import time

from kvferry.core.ids import RequestId
from kvferry.core.sampling import SamplingParams
from kvferry.engine.llm import LLM
from kvferry.engine.messages import EngineRequest


def start(settings):
    llm = LLM(
        settings["model"],
        dtype="auto",
        weights=settings.get("weights", "shipped"),
        numerics=settings.get("numerics", "exact"),
        kernels="auto",
        threads=settings["threads"],
        kv_bytes=1 << 30,
    )
    engine = llm.engine
    count = 0

    def serve(requests):
        nonlocal count
        made = []
        for request in requests:
            params = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True)
            made.append(EngineRequest(RequestId(f"peers-{count}"), request["tokens"], params))
            count += 1
        drawn, first = 0, None
        begun = time.monotonic()
        for request in made:
            engine.add(request)
        while engine.has_work:
            drawn += len(engine.step().updates)
            if drawn and first is None:
                first = time.monotonic() - begun
        return {
            "seconds": time.monotonic() - begun,
            "first_seconds": first,
            "input_tokens": sum(len(r["tokens"]) for r in requests),
            "output_tokens": drawn,
        }

    return serve, {"version": "this tree", "dtype": llm.dtype}
