"""Comparison of JSON values with the values at which a field has no effect."""

import pytest

from kvferry.gateway.http.fields.strict import is_no_op


@pytest.mark.parametrize("value", [None, False, [], {"effort": None}, [1]])
def test_a_value_equals_itself(value):
    assert is_no_op(value, (None, False, [], {"effort": None}, [1]))


@pytest.mark.parametrize("value", [0, 0.0, "", {}, {"effort": False}, [True], [1.0], {"effort": None, "summary": None}])
def test_equal_values_of_other_types_are_other_values(value):
    assert not is_no_op(value, (None, False, [], {"effort": None}, [1], {"effort": 0}))
