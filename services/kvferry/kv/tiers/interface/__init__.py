"""Tier interface, tier URLs, and the frame format of objects stored outside the process.

Pure. Frames are a persistent format: a change needs a new version and a new golden vector.
"""
