"""Worker processes: gRPC services on top of an engine, or of two engines with role `split`.

`main` runs the process; `unit` is an engine with its servers; `engine.loop` runs the engine on a thread; `services` has
the gRPC services and `calls` what they share; `handoff` has offers, prefetches and control calls between workers;
`local_source` serves clients directly.
"""
