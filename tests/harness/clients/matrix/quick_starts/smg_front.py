"""The model gateway of SGLang in front of the gateway."""

import sys

from shared.through_router import passes, router

URL, MODEL = sys.argv[1:]
with router(["smg", "launch"], URL, MODEL) as address:
    passes(address, MODEL)
