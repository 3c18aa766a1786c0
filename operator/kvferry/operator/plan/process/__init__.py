"""Decisions of the operator's process: lease, watch heartbeats, work queue, gateway reports. Pure."""
