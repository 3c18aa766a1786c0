"""A real Prometheus for tests: built once with Go into the user's cache, started on a free port."""
