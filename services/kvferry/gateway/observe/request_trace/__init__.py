"""A trace of requests for replays: arrival times, lengths and keyed block names in a bounded file.

Files are written here by a thread, never by the event loop. No line may have text, tokens, or names of tenants.
"""
