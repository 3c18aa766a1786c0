import pytest
from harness.fakes.answers import split

from kvferry.text.answers.marks import Marks
from kvferry.text.answers.registry import CallFormat


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        (" \n<think>hm</think>yes", False, "hm", "yes"),
        ("<think></think>yes", False, "", "yes"),
        ("<think>hm", False, "hm", ""),
        ("<think>a < b</think>", False, "a < b", ""),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("", False, "", ""),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("<think>hm</think>yes", True, "hm", "yes"),
        ("\n</think>yes", True, "", "yes"),
        ("hm </thi", True, "hm </thi", ""),
        ("hm", True, "hm", ""),
        ("hm</think>a</think>b", True, "hm", "a</think>b"),
    ],
)
def test_reasoning_at_the_start_is_split_off(text, is_open, reasoning, content):
    for pieces in ([text], list(text)):
        found = split(CallFormat.HERMES, pieces, has_reasoning=True, is_reasoning_open=is_open)
        assert found == (content, reasoning, [])


def test_calls_in_reasoning_are_not_calls():
    call = '<tool_call>{"name": "f"}</tool_call>'
    content, reasoning, calls = split(CallFormat.HERMES, [f"<think>{call}</think>{call}"], has_reasoning=True)
    assert (content, reasoning, len(calls)) == ("", call, 1)


def test_markers_may_be_control_tokens():
    marks = Marks.of({"<think>": 1, "</think>": 2})
    text = f"{marks.by_token[1]}a</think>b{marks.by_token[2]}c"
    assert split(CallFormat.HERMES, [text], has_reasoning=True, marks=marks) == ("c", "a</think>b", [])
    assert split(CallFormat.HERMES, ["<think>a</think>"], has_reasoning=True, marks=marks)[1] == ""


def test_reasoning_stays_content_if_it_is_not_split_off():
    assert split(CallFormat.HERMES, ["<think>a</think>b"]) == ("<think>a</think>b", "", [])
