"""Admission of requests: the flow controller's shell, tenants with their keys and policies, metrics and reports."""
