"""Weights of classes are parsed, and invalid ones are refused by name."""

import pytest

from kvferry.core.errors import UsageError
from kvferry.core.settings.class_weights import MAX_CLASSES, checked_weights, read_weights


def test_weights_are_pairs() -> None:
    assert read_weights("") == {}
    assert read_weights("0=4, -1=2,7=1000") == {0: 4, -1: 2, 7: 1000}
    assert checked_weights("0=4") == "0=4"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("0", "must be PRIORITY=WEIGHT"),
        ("1001=1", "a priority must be between -1000 and 1000, not 1001"),
        ("-1001=1", "a priority must be between -1000 and 1000, not -1001"),
        ("0=", "must be PRIORITY=WEIGHT"),
        ("=1", "must be PRIORITY=WEIGHT"),
        ("a=1", "must be PRIORITY=WEIGHT"),
        ("0=1.5", "must be PRIORITY=WEIGHT"),
        ("0=1,", "must be PRIORITY=WEIGHT"),
        ("0=" + "9" * 5000, "must be PRIORITY=WEIGHT"),
        ("0=0", "between 1 and 1000"),
        ("0=1001", "between 1 and 1000"),
        ("0=1,0=2", "priority 0 twice"),
        (",".join(f"{n}=1" for n in range(MAX_CLASSES + 1)), "at most 64"),
    ],
)
def test_an_invalid_weight_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_weights(spec)
    assert caught.value.field == "class_weights"
