"""Builds everything that a release publishes, from one commit (docs/releasing.md)."""
