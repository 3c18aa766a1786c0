"""The trace of one sample at the gateway: routing, calls to workers, losses and resumes.

Changed with the dispatcher that it follows; must not know OpenTelemetry, nor text of prompts and answers.
"""
