"""Simulated workers: the production scheduler and pages on a device profile, hand-offs over links, fits of profiles.

The duration of a step and of a transfer is decided here, and nothing about their content. This package must not import
the gateway.
"""
