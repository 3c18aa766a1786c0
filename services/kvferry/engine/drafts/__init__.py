"""Draft models and heads: loading, and the steps with which they propose tokens.

Computes with models and pages of its own; decisions are in `engine.speculation`. Does not use the scheduler.
"""
