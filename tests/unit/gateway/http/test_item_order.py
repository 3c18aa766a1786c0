"""The order of text and calls within one step, in the APIs whose answers are a list of items."""

from kvferry.core.inference.chunks import TextChunk, Usage
from kvferry.core.inference.tool_calls import CallDelta
from kvferry.core.sampling import FinishReason
from kvferry.gateway.http.messages import output as message_out
from kvferry.gateway.http.messages.progress import MessageProgress, usage_of
from kvferry.gateway.http.responses import output as response_out
from kvferry.gateway.http.responses.progress import ResponseProgress

BEGUN = CallDelta(0, "call_1", "weather", '{"city": ')
# One step ends the arguments, adds text and begins another call, as with several tokens a step.
CHUNKS = [
    TextChunk(0, "", (), tool_calls=(BEGUN,)),
    TextChunk(0, "and", (), tool_calls=(CallDelta(0, arguments='"Ulm"}'), CallDelta(1, "call_2", "time", "{}"))),
    TextChunk(0, "", (), FinishReason.STOP, Usage(1, 5)),
]


def test_a_response_ends_the_open_call_before_the_text() -> None:
    begun = response_out.Response(
        "resp_1", 0.0, "m", "in_progress", [], {}, True, True, "auto", [], {}, None, None, None, 1.0, 1.0, 0, None
    )  # fmt: skip
    progress = ResponseProgress(begun, lambda _: b"")
    events = [event for chunk in CHUNKS for event in progress.add(chunk)]
    assert [(type(item).__name__, getattr(item, "arguments", "")) for item in progress.response.output] == [
        ("OutputCall", '{"city": "Ulm"}'),
        ("OutputMessage", ""),
        ("OutputCall", "{}"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_message_ends_the_open_call_before_the_text() -> None:
    begun = message_out.AnswerMessage("msg_1", "m", [], usage_of(Usage(1, 0)))
    progress = MessageProgress(begun, 100)
    for chunk in CHUNKS:
        list(progress.add(chunk))
    found = [
        (type(block).__name__, getattr(block, "input", getattr(block, "text", "")))
        for block in progress.message.content
    ]
    assert found == [("ToolUseOutput", {"city": "Ulm"}), ("Text", "and"), ("ToolUseOutput", {})]
