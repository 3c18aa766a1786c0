"""Previews of changes to a pool: the operator's planner runs against a simulated cluster."""
