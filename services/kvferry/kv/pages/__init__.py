"""KV page layouts and their fingerprints, conversions between layouts, page digests.

Pure. Every change of the byte format changes the fingerprint and its golden vector.
"""
