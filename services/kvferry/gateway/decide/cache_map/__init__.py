"""Keeps a map of the workers' prefix caches and predicts which blocks of a prompt each worker has.

Without I/O: state follows from feed events and a clock. `cache_map.CacheMap` is the interface of this folder.
"""
