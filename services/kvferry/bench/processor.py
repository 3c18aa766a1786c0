"""The processor of this machine, as the kernel describes it."""

import platform
from pathlib import Path


def processor_facts() -> dict[str, str]:
    """Return what `/proc/cpuinfo` says about the first core; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines[:40])
    return {name.strip(): value.strip() for name, _, value in pairs}


def processor_name() -> str:
    """Return the name of the processor, or its architecture."""
    return processor_facts().get("model name", platform.machine())
