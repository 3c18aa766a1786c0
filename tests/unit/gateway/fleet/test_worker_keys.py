"""Keys of a gateway: the newest is tried first; earlier keys are kept for workers that still use them."""

import pytest

from kvferry.core.errors import UsageError
from kvferry.gateway.fleet.worker_keys import WorkerKeys
from kvferry.rpc.access.call_keys import role_key
from kvferry.rpc.access.table import CallerRole


def gateway_key(secret: bytes) -> bytes:
    return role_key(secret, CallerRole.GATEWAY).hex().encode()


FIRST, SECOND = b"the first secret of a pool", b"the second secret of a pool"


def test_earlier_keys_are_kept_behind_the_newest():
    lines = [gateway_key(FIRST)]
    keys = WorkerKeys(lambda: lines)
    (first,) = keys.signers
    keys.renew()
    assert len(keys.signers) == 1
    lines[0] = gateway_key(SECOND)
    keys.renew()
    assert len(keys.signers) == 2
    audience = ("/kvferry.v1.WorkerAdmin/Status", "h:1")
    assert keys.signers[1].metadata(*audience) == first.metadata(*audience)
    lines[0] = b"cut"
    keys.renew()
    assert len(keys.signers) == 2, "an unreadable key file does not remove the key that is in use"
    for number in range(10):
        lines[0] = gateway_key(b"further secret %016d" % number)
        keys.renew()
    assert len(keys.signers) == 4


@pytest.mark.parametrize(("lines", "says"), [([], "kvferry key gateway"), ([b"ab"], "64 hex"), ([b"\xff"], "64 hex")])
def test_a_missing_or_malformed_key_is_named(lines, says):
    with pytest.raises(UsageError, match=says):
        WorkerKeys(lambda: lines)
