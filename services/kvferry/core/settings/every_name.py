"""Names of the settings of all commands."""

from kvferry.core.settings.picker import PICKER
from kvferry.core.settings.processes import (
    BENCH,
    CLIENT,
    DOCTOR,
    GATEWAY,
    GATEWAY_KEY,
    LOGGING,
    TENANT_KEY,
    UP,
    WORKER,
)

EVERY_NAME = frozenset(
    setting.name
    for table in (WORKER, GATEWAY, UP, PICKER, BENCH, CLIENT, DOCTOR, LOGGING, TENANT_KEY, GATEWAY_KEY)
    for setting in table
)
"""An environment variable of another command's setting is ignored; of no setting, it is an error."""
