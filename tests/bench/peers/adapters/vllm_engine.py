"""vLLM for CPU, in this process: bfloat16, compiled, two threads that are not bound to cores.

The engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), because a separate engine process spins while it
waits, which takes one of two cores from the kernels. Two unbound threads are set (VLLM_CPU_OMP_THREADS_BIND=nobind,
OMP_NUM_THREADS=2), because vLLM's default on two cores computes on one. The engine has 1 GiB of KV, prefix caching, and
no tokenizer: requests have token ids.
"""

from arrivals import Arrivals
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
        first = count
        count += len(requests)
        arrivals, read = Arrivals(requests), {}
        while not arrivals.are_all_here or engine.has_unfinished_requests():
            for number, request in arrivals.due():
                params = SamplingParams(
                    temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False
                )
                engine.add_request(str(first + number), TokensPrompt(prompt_token_ids=request["tokens"]), params)
            if not engine.has_unfinished_requests():
                arrivals.rest()
                continue
            for output in engine.step():
                number = int(output.request_id) - first
                arrivals.drew(number, len(output.outputs[0].token_ids) - arrivals.drawn(number))
                read[number] = len(output.prompt_token_ids)
        return arrivals.outcome(sum(read.values()))

    return serve, {"version": __version__}
