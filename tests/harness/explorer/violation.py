"""The exception for a violated invariant."""


class Violation(Exception):
    """An invariant is violated; the message describes the violation."""
