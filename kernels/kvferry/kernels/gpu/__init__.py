"""Triton kernel backend for GPUs. For tests, Triton's interpreter runs it, slowly, on any CPU. Reading order: `device`,
`check` and `launch` (used by every wrapper before a launch), then `rows`, `norms`, `codes`, `heads`, then the folders
`attention`, `latent`, `experts` and `weights`; then the operations of `DeviceOps`: the folder `sampling`, `blocks`,
`digest`. `backend` contains the operation tables. Each kernel is private to its module and is called through the
wrapper below it. This package is imported only when the backend is selected.
"""
