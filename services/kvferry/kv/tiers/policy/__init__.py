"""Tier policies: eviction, admission, circuit breaking, request hedging, cluster slots.

Pure: without sockets, files or threads; time is an argument.
"""
