"""OpenVINO GenAI's continuous batching, stepped from here: all requests in one scheduler, each with its own lengths.

Two threads, 1 GB of KV, prefix caching on. Its own choices stand otherwise: products in bfloat16 where the CPU can, and
KV in 8 bits, less than the others keep. How many tokens a step may take is set, since its default is 256.
"""

import time

import numpy as np
import openvino as ov
import openvino_genai as genai


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
        handles, drawn, first = [], 0, None
        begun = time.monotonic()
        for request in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = request["new_tokens"], True, False
            ids = ov.Tensor(np.array([request["tokens"]], dtype=np.int64))
            handles.append(engine.add_request(count, ids, config))
            count += 1
        while engine.has_non_finished_requests():
            engine.step()
            for handle in handles:
                while handle.can_read():
                    drawn += sum(len(output.generated_ids) for output in handle.read().values())
            if drawn and first is None:
                first = time.monotonic() - begun
        return {
            "seconds": time.monotonic() - begun,
            "first_seconds": first,
            "input_tokens": sum(len(r["tokens"]) for r in requests),
            "output_tokens": drawn,
        }

    return serve, {"version": genai.__version__}
