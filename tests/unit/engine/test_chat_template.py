"""Templates of strangers, in a sandbox, with the environment that they are written for."""

import datetime

import pytest

from headrace.engine.chat_template import ChatTemplate
from headrace.engine.errors import RequestError

HI = [{"role": "user", "content": "hi"}]


def render(source, messages=HI, special=None, **kwargs):
    return ChatTemplate(source, special or {}).render(messages, **kwargs)


def failure(source, messages=HI, **kwargs):
    with pytest.raises(RequestError) as caught:
        render(source, messages, **kwargs)
    assert caught.value.code == "template_error"
    return caught.value.message


def test_messages_and_special_tokens_are_there_and_blocks_are_trimmed():
    source = """{{ bos_token }}{% for m in messages %}
[{{ m['role'] }}] {{ m.content }}
{% endfor %}
{% if add_generation_prompt %}
[assistant]{% endif %}"""
    assert render(source, special={"bos_token": "<s>"}) == "<s>[user] hi\n[assistant]"
    assert render(source, special={"bos_token": "<s>"}, add_generation_prompt=False) == (
        "<s>[user] hi\n"
    )


def test_a_template_may_refuse_and_its_words_reach_the_caller():
    """sglang#892: a system role that the template doesn't know was a server error."""
    source = "{{ raise_exception('System role not supported') }}"
    assert "System role not supported" in failure(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 'a' }}",
        "{% for %}",
        "{{ unknown.attribute }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_whatever_a_template_does_wrong_is_a_typed_error(source):
    assert failure(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_the_sandbox_holds(source):
    """Reaching for Python's insides gives nothing or an error, and never a value."""
    try:
        assert render(source) == ""
    except RequestError as error:
        assert error.code == "template_error"


def test_tojson_is_plain_json():
    value = [{"role": "user", "content": "<é> & '"}]
    assert render("{{ messages | tojson }}", value) == ('[{"role": "user", "content": "<é> & \'"}]')
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"


def test_the_date_is_there():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_loop_controls_and_the_generation_tag_are_there():
    source = "{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"
    assert render(source) == "1"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_the_callers_variables_are_there_and_cannot_replace_the_messages():
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ tools is none }}") == "True"
