"""Decisions of the engine: what is computed in each step, with which pages, and for whom.

Pure: no torch, threads, asyncio or I/O; the simulator runs the same modules. From the top: `adapters`, `pins` and
`loads` act on the scheduler of `plan`; `speculation` and `policies` decide for it; `blocks` has the pages; `step` has
the values that all of them share.
"""
