"""Which families of operations over torch's tensors there are, for whoever need not load one."""

FAMILIES = {
    "reference": "kvferry.kernels.reference",
    "torch": "kvferry.kernels.torch_cpu",
    "triton": "kvferry.kernels.gpu.family",
}
"""Family name to the module whose `OPS` it is; imported when asked for."""


def device_kind(device: object) -> str:
    """`cpu`, `cuda` or what else torch calls it, of a device or its name."""
    return str(device).partition(":")[0]


def family_for(device: object) -> str:
    """The fastest family that runs on a device, of torch or its name."""
    return "triton" if device_kind(device) == "cuda" else "torch"
