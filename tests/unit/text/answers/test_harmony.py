"""The harmony format: channels become reasoning, content and calls, in any pieces, with markers as tokens and text."""

import pytest
from harness.fakes.answers import split
from hypothesis import given
from hypothesis import strategies as st

from kvferry.text.answers.marks import HARMONY, Marks
from kvferry.text.answers.registry import CallFormat, recognized

ALL = Marks.of({text: number for number, text in enumerate(HARMONY)})
NONE = Marks()
ANALYSIS = "<|channel|>analysis<|message|>The user asks. <|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is\n-3 °C.<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": [1, 2]}<|call|>'
Expected = tuple[str, str, list[tuple[str, str, str]]]


def as_marks(text: str, marks: Marks) -> str:
    for marker in HARMONY:
        text = text.replace(marker, marks.written(marker))
    return text


CASES: list[tuple[str, Expected]] = [
    (ANALYSIS + FINAL, ("It is\n-3 °C.", "The user asks.", [])),
    (ANALYSIS + CALL, ("", "The user asks.", [("call_1", "f", '{"a": [1, 2]}')])),
    (
        ANALYSIS + "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>",
        ("", "The user asks.", [("call_1", "g", "{}")]),
    ),
    (" to=functions.f<|channel|>commentary json<|message|>{} <|call|>", ("", "", [("call_1", "f", "{}")])),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", ("", "", [("call_1", "f", "{}")])),
    ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", ("[1]", "", [])),
    ('<|channel|>commentary to=functions.f<|message|>{"a": x}', ("x}", "", [("call_1", "f", '{"a":')])),
    ('<|channel|>commentary to=functions.f<|message|>{"a": ', ("", "", [("call_1", "f", '{"a":')])),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", ("{}", "", [])),
    ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    (
        "<|channel|>commentary<|message|>I look it up.<|end|>" + CALL,
        ("I look it up.", "", [("call_1", "f", '{"a": [1, 2]}')]),
    ),
    ("<|channel|>commentary<|message|>First.<|end|>" + FINAL, ("First.\nIt is\n-3 °C.", "", [])),
    (ANALYSIS + "<|start|>assistant" + ANALYSIS + FINAL, ("It is\n-3 °C.", "The user asks.\nThe user asks.", [])),
    ("<|channel|>analysis<|message|>cut of", ("", "cut of", [])),
    ("<|channel|>ana", ("", "", [])),
    ('{"constrained": true}', ('{"constrained": true}', "", [])),
    (" plain text\n", (" plain text\n", "", [])),
    ("to", ("to", "", [])),
    ("to=nowhere", ("to=nowhere", "", [])),
    ("", ("", "", [])),
]


@pytest.mark.parametrize("marks", [NONE, ALL], ids=["text", "tokens"])
@pytest.mark.parametrize(("text", "expected"), CASES)
def test_messages_become_content_reasoning_and_calls(text: str, expected: Expected, marks: Marks) -> None:
    written = as_marks(text, marks)
    content, reasoning, calls = split(CallFormat.HARMONY, [written], marks=marks)
    spelled = [(call_id, name, arguments.replace(" ", "")) for call_id, name, arguments in calls]
    wanted = [(call_id, name, arguments.replace(" ", "")) for call_id, name, arguments in expected[2]]
    assert (content, reasoning, spelled) == (*expected[:2], wanted)
    assert split(CallFormat.HARMONY, list(written), marks=marks) == (content, reasoning, calls)


@given(
    st.lists(st.sampled_from([*HARMONY, "analysis", "final", " to=functions.f", "{", "}", '"a"', ":", " ", "\n", "x"]))
)
def test_any_text_is_split_alike_in_any_pieces(parts: list[str]) -> None:
    text = "".join(parts)
    whole = split(CallFormat.HARMONY, [text])
    assert split(CallFormat.HARMONY, list(text)) == whole
    assert split(CallFormat.HARMONY, parts) == whole


def test_text_that_spells_a_marker_is_content() -> None:
    written = as_marks(ANALYSIS, ALL) + as_marks(FINAL, ALL).replace("It is", "It is <|end|>")
    assert split(CallFormat.HARMONY, [written], marks=ALL)[0] == "It is <|end|>\n-3 °C."


def test_the_number_of_reported_calls_is_limited() -> None:
    text = ANALYSIS + CALL + CALL.replace(".f", ".g")
    assert [call[1] for call in split(CallFormat.HARMONY, [text])[2]] == ["f", "g"]
    assert [call[1] for call in split(CallFormat.HARMONY, [text], max_calls=1)[2]] == ["f"]


def test_the_format_is_recognized_by_template_and_tokens() -> None:
    assert recognized('{{ "<|start|>assistant<|channel|>final" }}', lambda _: False) is CallFormat.HARMONY
    assert recognized("", {"<|channel|>"}.__contains__) is CallFormat.HARMONY


def test_control_tokens_of_other_models_are_no_markers() -> None:
    assert not Marks.of({"<|end|>": 5, "<|start|>": 6}).by_token
