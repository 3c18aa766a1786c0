"""Splits the text that a model generates into reasoning, content and tool calls, incrementally.

    text ──► reasoning ──► content with calls ──► call parser ──► content
                 └─► reasoning_content                └─► calls: a name, then arguments as JSON text

The result depends on the text only, not on how it is split into pieces.
"""
