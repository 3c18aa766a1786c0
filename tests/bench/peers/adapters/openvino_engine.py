"""OpenVINO GenAI's continuous batching, run step by step: all requests in one scheduler, each with its own lengths.

Two threads, 1 GB of KV, prefix caching on. Other settings are OpenVINO's defaults: products in bfloat16 where the CPU
supports it, and KV in 8 bits, fewer than those of the other engines. The number of tokens per step is set, because its
default is 256.
"""

import numpy as np
import openvino as ov
import openvino_genai as genai
from arrivals import Arrivals


def start(settings):
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = settings["step_tokens"]
    properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
    engine = genai.ContinuousBatchingPipeline(
        settings["model"], scheduler_config=scheduler, device="CPU", properties=properties
    )
    count = 0

    def serve(requests):
        nonlocal count
        handles, arrivals = {}, Arrivals(requests)
        while not arrivals.are_all_here or engine.has_non_finished_requests():
            for number, request in arrivals.due():
                config = genai.GenerationConfig()
                config.max_new_tokens, config.ignore_eos, config.do_sample = request["new_tokens"], True, False
                ids = ov.Tensor(np.array([request["tokens"]], dtype=np.int64))
                handles[number] = engine.add_request(count, ids, config)
                count += 1
            if not engine.has_non_finished_requests():
                arrivals.rest()
                continue
            engine.step()
            for number, handle in handles.items():
                while handle.can_read():
                    arrivals.drew(number, sum(len(output.generated_ids) for output in handle.read().values()))
        return arrivals.outcome()

    return serve, {"version": genai.__version__}
