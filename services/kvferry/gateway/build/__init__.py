"""Builds the parts of a gateway from its configuration."""
