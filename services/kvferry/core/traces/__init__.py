"""Traces of requests: spans, the current span, and the position of a call in a trace.

Must not depend on the export of spans (`rpc/otlp.py`); no attribute may contain text from a prompt or an answer.
"""
