"""Siege of `kvferry up`: hostile clients of all kinds in one process, and a canary whose latency is compared with its
own latency before the siege, in another one. Run with `make siege`.
"""
