"""One simulated worker: the production scheduler and pages on a device profile, and how a profile is fitted.

The duration of a step is decided here, and nothing about its content. This package must not know the gateway.
"""
