"""The HTTP server: connections, the protocol on them, and certificates.

Knows no routes; see `client_api` and `admin_api`.
"""
