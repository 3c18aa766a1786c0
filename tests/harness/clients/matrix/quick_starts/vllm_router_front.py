"""The router of vLLM's production stack in front of the gateway."""

import sys

from shared.through_router import passes, router

URL, MODEL = sys.argv[1:]
with router(["vllm-router", "--policy", "cache_aware"], URL, MODEL) as address:
    passes(address, MODEL)
