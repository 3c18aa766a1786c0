"""The error of a gateway that serves no files and batches."""

from kvferry.core.errors import Unavailable
from kvferry.gateway.batches.batch_errors import FOLDER_SETTING
from kvferry.gateway.batches.batch_service import BatchService


class BatchesOff(Unavailable):
    """This gateway keeps no files and batches."""

    grpc_status = "UNIMPLEMENTED"
    http_status = 501
    reason = "BATCHES_OFF"


def opened(service: BatchService | None) -> BatchService:
    """Return the service.

    Raises:
        BatchesOff: this gateway has none.
    """
    if service is None:
        raise BatchesOff(
            f"this gateway keeps no files and batches: {FOLDER_SETTING} is off; set it to a folder",
            field=FOLDER_SETTING,
        )
    return service
