"""Registry of kernel families over torch tensors; families are not imported here."""

FAMILIES = {
    "reference": "kvferry.kernels.reference.forward",
    "torch": "kvferry.kernels.torch_family.family",
    "triton": "kvferry.kernels.gpu.family",
}
"""Module with the `OPS` of each kernel family; modules are imported on first use."""


def device_kind(device: object) -> str:
    """Return the torch device type (`cpu`, `cuda`, ...) of a device or its name."""
    return str(device).partition(":")[0]


def family_for(device: object) -> str:
    """Return the fastest kernel family for a torch device or its name."""
    return "triton" if device_kind(device) == "cuda" else "torch"
