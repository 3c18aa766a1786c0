"""Real servers and processes for tests: Redis, workers, whole stacks, network namespaces."""
