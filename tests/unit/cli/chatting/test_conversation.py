"""Messages of a chat, its statistics, and how both look."""

import io

from kvferry.cli.chatting.answer_stats import stats_line, stats_report
from kvferry.cli.chatting.conversation import Conversation
from kvferry.cli.chatting.received_answer import PartKind, ReceivedAnswer
from kvferry.cli.chatting.screen import Screen
from kvferry.cli.chatting.stream_events import StreamedPromptTokens, StreamedUsage
from kvferry.core.inference.chunks import Timing


def test_a_conversation_has_its_turns_in_order() -> None:
    one = Conversation("Be brief.").answered("a", "b").answered("c", "d")
    roles = [message["role"] for message in one.messages("e")]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [message["content"] for message in one.messages("e")] == ["Be brief.", "a", "b", "c", "d", "e"]
    assert len(one.messages()) == 5
    assert one.undone().messages("x")[-1] == {"role": "user", "content": "x"}
    assert one.undone().undone().undone().messages() == [{"role": "system", "content": "Be brief."}]
    assert one.cleared().messages() == [{"role": "system", "content": "Be brief."}]
    assert one.cleared().with_system("").messages() == []


def test_statistics_are_those_that_are_known() -> None:
    answer = ReceivedAnswer(10.0, first_at=10.25, ended_at=12.25)
    assert stats_line(answer) == "TTFT 250 ms, 2.25 s"
    assert "did not say where" in stats_report(answer)
    answer.usage = StreamedUsage(40, 21, StreamedPromptTokens(16))
    assert stats_line(answer) == "TTFT 250 ms, 10.0 tokens/s, 40 prompt tokens (16 cached), 21 generated, 2.25 s"
    answer.timing = Timing(0.01, 0.2, 0.24, total_seconds=2.2, prefill_worker="\x1b[2Jp:1", decode_worker="d:1")
    report = stats_report(answer)
    assert [line.split()[0] for line in report.splitlines()[1:]] == ["queue", "prefill", "first", "hand-off", "decode"]
    assert "40 tokens, 16 cached, [2Jp:1" in report


def screen(*, is_terminal: bool) -> tuple[Screen, io.StringIO, io.StringIO]:
    output, errors = io.StringIO(), io.StringIO()
    return Screen(output, errors, is_terminal=is_terminal, has_colours=is_terminal), output, errors


def test_on_a_terminal_reasoning_is_dim_and_apart_from_the_answer() -> None:
    shown, output, errors = screen(is_terminal=True)
    shown.part(PartKind.REASONING, "hm\x1b[31m")
    shown.part(PartKind.TEXT, "\n\nYes")
    shown.part(PartKind.CALL, "\n[call f] {}")
    shown.end_answer()
    shown.note("stopped")
    assert output.getvalue() == "\x1b[2mhm[31m\x1b[0m\nYes\n[call f] {}\n\x1b[2mstopped\x1b[0m\n"
    shown.part(PartKind.REASONING, "hm")
    shown.error("it \x1bfailed")
    assert output.getvalue().endswith("\x1b[2mhm\x1b[0m\n")
    assert errors.getvalue() == "kvferry: it failed\n"


def test_in_a_pipe_there_is_the_answer_alone() -> None:
    shown, output, _ = screen(is_terminal=False)
    shown.part(PartKind.REASONING, "hm")
    shown.part(PartKind.TEXT, "Yes.")
    shown.end_answer()
    assert output.getvalue() == "Yes.\n"
