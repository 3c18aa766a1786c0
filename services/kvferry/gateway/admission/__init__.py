"""Admission of requests: the gate of the flow controller, tenants with their keys and policies, metrics and reports."""
