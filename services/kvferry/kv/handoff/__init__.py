"""Hand-off protocol as state machines: tickets, offers (prefill side), transfers and attempts (decode side).

Pure: methods take events and the time and return effects, and the explorer runs these classes through all
interleavings. This package must not depend on transports, threads or gRPC.
"""
