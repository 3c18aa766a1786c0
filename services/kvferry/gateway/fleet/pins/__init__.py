"""Pinned prefixes of a pool: the prefixes that operators registered with this gateway, and their pins on workers."""
