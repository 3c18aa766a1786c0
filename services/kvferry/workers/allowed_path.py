"""Resolves the paths that callers name, which must be below a folder of the worker's administrator."""

from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import Forbidden, InvalidRequest, shortened

_MAX_PATH_CHARS = 4096


@dataclass(frozen=True, slots=True)
class AllowedFolder:
    """A folder below which callers may name paths."""

    folder: str
    """The folder; empty refuses all paths."""
    field: str
    """Name of the field with the path, for errors."""
    what: str
    """What is at the path, such as `a folder`, for errors."""
    title: str
    """Name of the folder, such as `adapter folder`, for errors."""
    why_none: str
    """Message of the error without a folder, with a remedy."""

    def resolved(self, path: str) -> Path:
        """Resolve a path, following symbolic links.

        Raises:
            InvalidRequest: the path is not valid or cannot be resolved.
            Forbidden: the path is not below the folder, or there is none.
        """
        if not self.folder:
            raise Forbidden(self.why_none, field=self.field)
        if not path or len(path) > _MAX_PATH_CHARS or "\x00" in path:
            raise InvalidRequest(
                f"{self.field} must be the path of {self.what}, with 1 to {_MAX_PATH_CHARS} characters",
                field=self.field,
            )
        root = Path(self.folder).resolve()
        try:
            found = (root / path).resolve()
        except (OSError, RuntimeError) as error:  # a loop of symbolic links
            raise InvalidRequest(
                f"{self.field} {shortened(path)!r} cannot be resolved: {error}; use the path of {self.what}",
                field=self.field,
            ) from error
        if found == root or not found.is_relative_to(root):
            raise Forbidden(
                f"{self.field} {shortened(path)!r} is not below the worker's {self.title}; use {self.what} in it",
                field=self.field,
            )
        return found
