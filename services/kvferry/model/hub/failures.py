"""Converts errors of huggingface_hub to errors of kvferry.

Messages name neither addresses of files, which may be signed, nor anything that a server has sent.
"""

import errno
import logging
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from kvferry.core.errors import KvferryError, ModelFileError, Unavailable, UnknownModel
from kvferry.model.hub.names import HubName

_QUERY = re.compile(r"\?[^\s'\"]*")


class TransferStopped(Exception):
    """Ends a transfer, because another one has failed."""


class TooMuchSent(Exception):
    """A server sent more bytes than the hub had announced for a file."""


def is_unreachable(error: BaseException) -> bool:
    """Return whether the hub did not answer, or answered that it cannot serve now."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in {408, 429} or error.response.status_code >= 500
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return True
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def is_missing(error: BaseException) -> bool:
    """Return whether there is no such repository, or none that this user may see."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    return isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)


def explained(
    error: BaseException, name: HubName, endpoint: str, similar: Sequence[str] = (), *, is_listed: bool = False
) -> KvferryError:
    """Return the error of kvferry for an error of huggingface_hub.

    Args:
        error: what huggingface_hub raised.
        name: name of the model.
        endpoint: URL of the hub.
        similar: names of existing models, for a name that does not exist.
        is_listed: whether the hub has listed the files of the model before.
    """
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RevisionNotFoundError

    what, hub = f"model {name.served!r}", shown_url(endpoint)
    if isinstance(error, KvferryError):
        return error
    if isinstance(error, GatedRepoError):
        return ModelFileError(
            f"{what} is gated: accept its licence at {hub}/{name.repo}, and set HF_TOKEN to a token of that account "
            "that may read gated repositories",
            field="model",
        )
    if is_missing(error) and not is_listed:
        meant = f"; did you mean {', '.join(similar)}?" if similar else "; check the name."
        return UnknownModel(
            f"{what} is neither a local folder nor a model that {hub} shows{meant} For a private model, set HF_TOKEN "
            "to a token that may read it",
            field="model",
        )
    if isinstance(error, RevisionNotFoundError):
        return UnknownModel(
            f"{what} has no revision {name.revision!r}; use a branch or a tag at {hub}/{name.repo}, or a whole commit",
            field="model",
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in {401, 403}:
            return ModelFileError(
                f"{what}: {hub} refuses access ({status}); set HF_TOKEN to a valid token that may read it",
                field="model",
            )
        if status == 429:
            return Unavailable(
                f"{what}: {hub} limits requests ({status}); try again later, or set HF_TOKEN", field="model"
            )
        return Unavailable(
            f"{what}: {hub} answered with status {status}; try again later, or check HF_ENDPOINT", field="model"
        )
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ModelFileError(
            f"{what}: the disk of the cache is full; free space, or set HF_HUB_CACHE to a folder on another disk",
            field="model",
        )
    if isinstance(error, TooMuchSent):
        return ModelFileError(f"{what}: {error}; the file was discarded. Check HF_ENDPOINT", field="model")
    if is_unreachable(error):
        return Unavailable(
            f"{what}: {hub} cannot be reached, or the connection was cut ({type(error).__name__}); check the network "
            f"and HF_ENDPOINT. Files that were fetched are kept: run `kvferry pull {name.given}` again",
            field="model",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return ModelFileError(
            f"{what}: the cache cannot be written ({error.strerror}); set HF_HUB_CACHE to a folder of this user",
            field="model",
        )
    if isinstance(error, ValueError) and "too large" in str(error):
        return ModelFileError(
            f"{what} has a file of more than 50 GB, which needs hf_xet and a hub that offers it; use "
            "a checkpoint with smaller files",
            field="model",
        )
    return ModelFileError(
        f"{what}: the download failed ({type(error).__name__}); run `kvferry pull {name.given}` again, "
        "set HF_HUB_DISABLE_XET=1 for plain HTTP, or check HF_ENDPOINT",
        field="model",
    )


def shown_url(endpoint: str) -> str:
    """Return a URL for messages: without user, password and query."""
    found = urlsplit(endpoint)
    return f"{found.scheme}://{found.netloc.rpartition('@')[2]}{found.path.rstrip('/')}"


def hide_queries() -> None:
    """Keep the queries of URLs, which may be signatures, out of the logs of huggingface_hub and of its HTTP client.
    Idempotent."""
    for name in ("huggingface_hub.file_download", "huggingface_hub.utils._http", "httpx2"):
        logging.getLogger(name).addFilter(_without_query)
    headers = logging.getLogger("httpcore2")  # logs the headers of answers, with the addresses of redirects
    headers.setLevel(max(logging.INFO, headers.level))


def _without_query(record: logging.LogRecord) -> bool:
    record.msg, record.args = _QUERY.sub("?...", record.getMessage()), None
    return True
