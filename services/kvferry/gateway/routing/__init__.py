"""Decides which workers exist, which of them serve a request, and when a request is held.

Pure functions of fleet snapshots and a clock. A new routing policy belongs here.
"""
