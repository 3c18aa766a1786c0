"""Errors for paths and methods that a server does not have, or for objects that it does not store."""

from kvferry.core.errors import InvalidRequest


class NoSuchRoute(InvalidRequest):
    """The path, or the object that it names, does not exist on this server."""

    http_status = 404
    reason = "NOT_FOUND"


class MethodNotAllowed(NoSuchRoute):
    """The path exists but does not support the method."""

    http_status = 405
    reason = "METHOD_NOT_ALLOWED"


def no_such_request(message: str) -> NoSuchRoute:
    """Return the error for a request id without a record."""
    return NoSuchRoute(message, field="request_id", reason="REQUEST_NOT_FOUND")
