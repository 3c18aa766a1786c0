"""Views of a running engine: statistics, load, and recordings of steps with their plans and the times of phases.

Changes nothing in an engine. This package must not import runners, models or gRPC.
"""
