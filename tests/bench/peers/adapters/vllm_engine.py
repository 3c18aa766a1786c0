"""vLLM for CPU, in this process: bfloat16, compiled, two threads that are not bound to cores.

In this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), because its engine's own process waits in a spin, which on two cores
takes one of the two from the kernels. Threads unbound and two (VLLM_CPU_OMP_THREADS_BIND=nobind, OMP_NUM_THREADS=2),
because its own choice on two cores leaves one to compute. 1 GiB of KV. Prefix caching on. No tokenizer: ids in and out.
"""

import time

from vllm import LLM, SamplingParams, TokensPrompt, __version__


def start(settings):
    llm = LLM(
        model=settings["model"],
        dtype="bfloat16",
        max_model_len=8192,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        seed=0,
    )
    engine = llm.llm_engine
    count = 0

    def serve(requests):
        nonlocal count
        drawn, read, first = {}, {}, None
        begun = time.monotonic()
        for request in requests:
            params = SamplingParams(
                temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False
            )
            engine.add_request(f"peers-{count}", TokensPrompt(prompt_token_ids=request["tokens"]), params)
            count += 1
        while engine.has_unfinished_requests():
            for output in engine.step():
                drawn[output.request_id] = len(output.outputs[0].token_ids)
                read[output.request_id] = len(output.prompt_token_ids)
                if first is None:
                    first = time.monotonic() - begun
        return {
            "seconds": time.monotonic() - begun,
            "first_seconds": first,
            "input_tokens": sum(read.values()),
            "output_tokens": sum(drawn.values()),
        }

    return serve, {"version": __version__}
