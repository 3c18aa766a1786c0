"""Errors of paths and methods that a server does not have, or of objects that it does not keep."""

from kvferry.core.errors import InvalidRequest


class NoSuchRoute(InvalidRequest):
    """The path does not exist on this server, or the object that it names."""

    http_status = 404
    reason = "NOT_FOUND"


class MethodNotAllowed(NoSuchRoute):
    """The path exists but does not support the method."""

    http_status = 405
    reason = "METHOD_NOT_ALLOWED"
