"""Pins of an engine under test."""
