"""The trace of one sample at the gateway: routing, calls to workers, losses and resumes.

Follows the dispatcher and changes with it. Must not import OpenTelemetry, and no span may contain text of prompts or
answers.
"""
