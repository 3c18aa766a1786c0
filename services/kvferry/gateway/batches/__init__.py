"""Files and batches on disk: their records, their folder, and the computation of a batch line by line.

Lines are computed by a function that the HTTP API provides. Must not import the HTTP API.
"""
