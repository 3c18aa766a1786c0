"""llama.cpp through its C interface, with batches and a prefix cache as in a server.

Two threads for single tokens and two for batches, batches of 2,048 tokens, F16 KV; other settings are llama.cpp's
defaults. There is one context for long prompts and one for each batch size, made at the start with separate KV for each
sequence, because with a unified cache every sequence attends over all cells. All prompts are computed first, then all
sequences one token per step, which ends concurrent requests soonest. The first sequence of a context is kept as its
prefix cache.
"""

import ctypes
import time

import llama_cpp as lib
import numpy as np

BATCH_TOKENS = 2048
SHAPES = ((16, 1280), (64, 768), (1, 4352))
"""Number of sequences, and tokens of each; the first context that fits is used. A setting `shapes` replaces them."""


class Context:
    def __init__(self, model, sequences, length, threads):
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * length, sequences
        params.n_batch, params.n_ubatch = BATCH_TOKENS, 512
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        params.no_perf = True
        self.raw = lib.llama_init_from_model(model, params)
        assert self.raw, f"no context of {sequences} x {length} tokens"
        self.memory = lib.llama_get_memory(self.raw)
        self.sequences, self.length = sequences, length
        self.kept = []
        self.batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def decode(self, rows):
        """Compute rows of (token, position, sequence, has logits); return the greedy token of each row with logits."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        status = lib.llama_decode(self.raw, batch)
        assert status == 0, f"llama_decode returned {status}"
        return [self._greedy(i) for i, row in enumerate(rows) if row[3]]

    def _greedy(self, row):
        logits = lib.llama_get_logits_ith(self.raw, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())


def start(settings):
    lib.llama_backend_init()
    lib.llama_log_set(_silent, ctypes.c_void_p(0))
    model = lib.llama_model_load_from_file(settings["model"].encode(), lib.llama_model_default_params())
    assert model, "llama.cpp cannot load the model"
    Context.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    contexts = [Context(model, n, length, settings["threads"]) for n, length in settings.get("shapes", SHAPES)]

    def serve(requests):
        asked = [r["tokens"] for r in requests]
        longest = max(len(r["tokens"]) + r["new_tokens"] for r in requests)
        fit = [c for c in contexts if c.sequences >= len(requests) and c.length >= longest]
        context = fit[0]
        begun = time.monotonic()
        done = _reuse(context, asked)
        queue = [
            (token, position, sequence, position == len(tokens) - 1)
            for sequence, tokens in enumerate(asked)
            for position, token in enumerate(tokens)
            if position >= done[sequence]
        ]
        last, drawn, first = {}, 0, None
        for at in range(0, len(queue), BATCH_TOKENS):
            rows = queue[at : at + BATCH_TOKENS]
            found = context.decode(rows)
            last |= dict(zip((row[2] for row in rows if row[3]), found, strict=True))
            if found and first is None:
                first = time.monotonic() - begun
        drawn, step = len(last), 1
        while True:
            going = [s for s, request in enumerate(requests) if request["new_tokens"] > step]
            if not going:
                break
            found = context.decode([(last[s], len(asked[s]) + step - 1, s, True) for s in going])
            last |= dict(zip(going, found, strict=True))
            drawn += len(found)
            step += 1
        seconds = time.monotonic() - begun
        return {
            "seconds": seconds,
            "first_seconds": first,
            "input_tokens": sum(map(len, asked)),
            "output_tokens": drawn,
        }

    return serve, {"version": lib.__version__}


def _reuse(context, asked):
    """Empty the context except for the prefix that its first sequence shares with all prompts; return its length."""
    shared = [min(_common(context.kept, tokens), len(tokens) - 1) for tokens in asked]
    for sequence in range(1, context.sequences):
        lib.llama_memory_seq_rm(context.memory, sequence, -1, -1)
    for sequence, count in enumerate(shared):
        if sequence and count:
            lib.llama_memory_seq_cp(context.memory, 0, sequence, -1, -1)
    for sequence, count in enumerate(shared):
        lib.llama_memory_seq_rm(context.memory, sequence, count, -1)
    context.kept = asked[0]
    return shared


def _common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@lib.llama_log_callback
def _silent(level, text, data):
    pass
