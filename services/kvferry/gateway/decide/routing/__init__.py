"""Decides which workers exist, which of them serve a request, and when a request is held.

Without I/O: decisions follow from fleet snapshots and a clock. A new routing policy belongs here.
"""
