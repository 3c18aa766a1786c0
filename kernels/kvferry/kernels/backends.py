"""Registry of kernel backends for torch tensors; backends are not imported here."""

BACKENDS = {
    "reference": "kvferry.kernels.reference.forward",
    "torch": "kvferry.kernels.torch_family.backend",
    "triton": "kvferry.kernels.gpu.backend",
}
"""Module with the `OPS` of each kernel backend; modules are imported on first use."""


def device_kind(device: object) -> str:
    """Return the torch device type (`cpu`, `cuda`, ...) of a device or its name."""
    return str(device).partition(":")[0]


def backend_for(device: object) -> str:
    """Return the fastest kernel backend for a torch device or its name."""
    return "triton" if device_kind(device) == "cuda" else "torch"
