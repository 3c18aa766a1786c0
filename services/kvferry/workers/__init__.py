"""Worker processes: the gRPC services around one engine (two, for role `split`), in any role.

`loop` runs the engine on its own thread; `prefill`, `decode`, `transfer` and `admin` are the services; `peers`
talks to other workers; `local` answers clients directly; `build` puts an engine together; `main` is the process.
"""
