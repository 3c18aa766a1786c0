"""Quick starts of client libraries, benchmarks and agents, each in an environment of its own, against `kvferry up`."""
