"""The engine's thread: commands to an engine, and the streams of its requests for an event loop.

`stream_interval` is pure. Only `engine_loop` accesses the engine, on its thread.
"""
