"""What must be set before anything is imported."""

import os

# Triton decides when it is imported whether it compiles or interprets; `make test-gpu` says 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ["TRITON_INTERPRET"] != "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU, `--device auto` would have every engine interpreted
