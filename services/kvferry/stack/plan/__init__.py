"""Plans a local stack: its processes and their restarts.

Performs no I/O: settings and a clock determine command lines and delays.
"""
