"""Recognizes weights in formats that can run code when they are read, which are refused. Pure."""

import re

_PICKLED = re.compile(r"(?:pytorch_model.*\.bin|consolidated.*\.pth|.*\.(?:pt|pth|ckpt|pkl))")
CONVERT = (
    "convert it to safetensors on a machine that may run its code: "
    "`transformers.AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(FOLDER)`, and serve FOLDER"
)
"""What to do with such a model."""


def is_pickled(name: str) -> bool:
    """Return whether a file name is one of weights that are a pickle."""
    return _PICKLED.fullmatch(name) is not None
