"""Draft models and heads: loading, and the steps with which they propose tokens.

Uses its own models and pages; decisions are in `engine.schedule.speculation`. Does not use the scheduler.
"""
