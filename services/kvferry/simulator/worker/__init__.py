"""Simulated workers: the production scheduler and pages on a device profile, hand-offs over links, fits of profiles.

Only the durations of steps and transfers are modeled here, not their content. This package must not import the
gateway.
"""
