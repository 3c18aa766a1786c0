"""Proposers, draft models and random interleavings for tests of speculation."""
