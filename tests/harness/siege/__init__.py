"""Siege of `kvferry up`: hostile clients of all kinds in one process, and in another process a canary whose latency
during the siege is compared with that before it. Run with `make siege`.
"""
