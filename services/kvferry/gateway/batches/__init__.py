"""Files and batches: their storage on disk or in Redis, and the computation of a batch line by line.

Lines are computed by a function that the HTTP API provides. Must not import the HTTP API.
"""
