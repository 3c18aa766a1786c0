"""What the explorer looks for."""


class Violation(Exception):
    """Something that must hold does not; the message says what."""
