"""transformers in kvferry's environment: batches of requests with equal lengths, which start together.

bfloat16 weights and KV, two threads, the default attention and cache. `experts` selects the implementation of the
experts.
"""

import time

import torch
import transformers


def start(settings):
    torch.set_num_threads(settings["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.bfloat16, experts_implementation=settings["experts"]
    ).train(False)

    @torch.inference_mode()
    def serve(requests):
        tokens = torch.tensor([request["tokens"] for request in requests])
        (count,) = {request["new_tokens"] for request in requests}
        begun = time.monotonic()
        found = model(tokens, logits_to_keep=1, use_cache=True)
        chosen = found.logits[:, -1].argmax(-1, keepdim=True)
        first = time.monotonic() - begun
        for _ in range(count - 1):
            found = model(chosen, past_key_values=found.past_key_values, use_cache=True)
            chosen = found.logits[:, -1].argmax(-1, keepdim=True)
        return {
            "seconds": time.monotonic() - begun,
            "first_seconds": first,
            "input_tokens": tokens.numel(),
            "output_tokens": count * len(requests),
        }

    return serve, {"version": transformers.__version__}
