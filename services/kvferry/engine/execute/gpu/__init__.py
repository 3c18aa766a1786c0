"""GPU execution of steps: CUDA graph capture, sampling on the device, no host synchronization.

The design is described in docs/adr/0019-captured-steps.md.
"""
