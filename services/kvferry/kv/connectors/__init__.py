"""Transports, one module each; they do not know each other. Each offers `open_transport(incarnation, setup)`.

All of them pass `kvferry.testing.connector_suite`, `memory` first: it is the definition of the others.
"""
