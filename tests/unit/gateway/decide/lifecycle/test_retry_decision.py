import pytest

from kvferry.core import errors
from kvferry.gateway.decide.lifecycle.retry_decision import RetryDecision, retry_decision


@pytest.mark.parametrize(
    ("kind", "decision"),
    [
        (errors.InvalidRequest, RetryDecision.FATAL),
        (errors.Unauthenticated, RetryDecision.FATAL),
        (errors.UnknownModel, RetryDecision.FATAL),
        (errors.DeadlinePassed, RetryDecision.FATAL),
        (errors.UsageError, RetryDecision.FATAL),
        (errors.Overloaded, RetryDecision.ELSEWHERE),
        (errors.TicketRejected, RetryDecision.DROP_TICKET),
        (errors.Unavailable, RetryDecision.SUSPECT),
        (errors.RequestCancelled, RetryDecision.SUSPECT),
        (errors.InvariantBroken, RetryDecision.SUSPECT),
        (errors.ModelFileError, RetryDecision.SUSPECT),
    ],
)
def test_the_decision_for_each_error(kind, decision):
    assert retry_decision(kind("x")) is decision
