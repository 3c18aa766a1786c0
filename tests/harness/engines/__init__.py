"""Engines under test: runners that wait, and pins."""
