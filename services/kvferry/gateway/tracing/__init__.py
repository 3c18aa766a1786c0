"""The trace of one sample at the gateway: routing, calls to workers, losses and resumes.

Changed with the dispatcher that it follows; must not import OpenTelemetry, and no span may contain text of prompts or
answers.
"""
