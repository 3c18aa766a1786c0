"""Helpers for tests. May import anything; nothing that ships imports it."""
