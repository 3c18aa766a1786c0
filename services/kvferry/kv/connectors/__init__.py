"""Transports: one module per connector, each with a function `open_transport(incarnation, setup)`. They do not depend
on each other.

All transports pass `kvferry.testing.connector_suite`; `memory` is the reference implementation.
"""
