"""Decisions of the endpoint picker, without I/O: the exchange with the proxy, prompts, loads, choices, shedding."""
