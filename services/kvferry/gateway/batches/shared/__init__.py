"""Files and batches in Redis: calls, contents, records, scripts, and the storage of them."""
