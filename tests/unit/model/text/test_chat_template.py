"""Templates run in a sandbox and fail as invalid requests."""

import pytest

from kvferry.core.errors import InvalidRequest, ModelFileError
from kvferry.model.text.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]


def test_generation_prompt_and_tokens_are_the_templates_to_place() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}",
        bos_token="<s>",
        eos_token="</s>",
    )
    assert template.render(HELLO) == "<s>user:Hello</s>>"
    assert template.render(HELLO, add_generation_prompt=False) == "<s>user:Hello</s>"


def test_white_space_control_is_that_of_hugging_face() -> None:
    assert ChatTemplate("{% if true %}\n  a\n{% endif %}\nb").render(HELLO) == "  a\nb"


def test_json_is_plain() -> None:
    assert ChatTemplate("{{ messages | tojson }}").render([{"role": "user", "content": "<é>"}]) == (
        '[{"role": "user", "content": "<é>"}]'
    )


def test_a_refusal_by_the_template_is_told() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(HELLO)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 'x' * 100000000000 }}",
        "{{ 2 ** 1000000000 }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_must_not_do_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, max_output_chars=10_000).render([dict(m) for m in HELLO])


def test_no_messages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages is empty"):
        ChatTemplate("x").render([])


def test_a_template_that_does_not_compile_is_a_damaged_model_file() -> None:
    with pytest.raises(ModelFileError, match="does not compile"):
        ChatTemplate("{% for %}")
