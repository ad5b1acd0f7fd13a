"""Templates are data: sandboxed, out of time after their budget, out of space beyond their limit."""

import itertools
import time
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import SecurityError

from gateway.conversation import NotExactError, conversation
from gateway.templates import OverBudgetError, Template

FAR = 1e9


def template(source: str) -> Template:
    return Template(source, clock=lambda: 0.0)


def render(source: str, content: Any = "hi", limit: int = 10_000, **variables: Any) -> str:
    messages = [{"role": "user", "content": content}]
    return template(source).render(messages, variables, {"bos_token": "<s>"}, until=FAR, limit=limit)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''.__class__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages.clear() }}",
        "{{ self.__init__ }}",
    ],
)
def test_nothing_escapes_and_nothing_is_changed(source: str) -> None:
    try:
        text = render(source)
    except (SecurityError, jinja2.UndefinedError):
        return
    assert text in ("", "[]") or "class" not in text


def test_a_request_cannot_bring_or_move_the_template() -> None:
    for name in ("chat_template", "messages", "tokenize", "conversation", "return_dict"):
        with pytest.raises(NotExactError) as raised:
            render("{{ messages }}", **{name: "{{ 7 * 7 }}"})
        assert raised.value.reason == "chat_template_kwargs"
    assert render("{{ messages[0].content }}", "{{ 7 * 7 }}") == "{{ 7 * 7 }}"
    assert render("{{ word }}", word="{{ 7 * 7 }}") == "{{ 7 * 7 }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) recursive %}{% if loop.depth < 90 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
    ],
)
def test_a_runaway_template_is_stopped_by_the_clock(source: str) -> None:
    turns = itertools.count()
    made = Template(source, clock=lambda: float(next(turns)))
    with pytest.raises(OverBudgetError):
        made.render([{"role": "user", "content": ""}], {}, {}, until=5_000.0, limit=1_000_000)
    assert next(turns) < 5_010


def test_the_real_clock_stops_it_too() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    made = Template(loops, clock=time.monotonic)
    began = time.monotonic()
    with pytest.raises(OverBudgetError):
        made.render([{"role": "user", "content": ""}], {}, {}, until=began + 0.05, limit=10)
    assert time.monotonic() - began < 5.0


def test_text_beyond_the_limit_is_not_kept() -> None:
    assert render("{% for a in range(100) %}xxxxxxxxxx{% endfor %}", limit=1000) == "x" * 1000
    with pytest.raises(OverBudgetError):
        render("{% for a in range(101) %}xxxxxxxxxx{% endfor %}", limit=1000)
    with pytest.raises(OverflowError):
        render("{{ range(1000000) | list }}")


def test_what_templates_are_given() -> None:
    assert (
        render("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}") == "True True False"
    )
    assert render("{{ bos_token }}{{ eos_token }}") == "<s>"
    assert render("{{ bos_token }}", bos_token="B") == "B"
    assert render("{{ {'b': '<é>', 'a': [1, None]} | tojson }}") == '{"b": "<é>", "a": [1, null]}'
    assert render("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'
    assert render("{{ [2,1] | tojson(separators=(',', ':')) }}") == "[2,1]"
    assert render("{% generation %}a{% endgeneration %}{% for x in [1, 2] %}{% break %}{% endfor %}b") == "ab"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    with pytest.raises(jinja2.TemplateError):
        render("{{ raise_exception('no') }}")


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        ("[{{ messages[0].content }}] end", "go on", "[go on"),
        ("[{{ messages[0].content }}] end", "go on  ", "[go on  "),
        ("[{{ messages[0].content | trim }}] end", "go on  ", "[go on"),
        ("[{{ messages[0].content | trim }}] end", "go on", "[go on"),
        (
            "{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}",
            [{"text": "a"}, {"text": "b"}],
            "<a><b",
        ),
    ],
)
def test_a_continued_message_stays_open(source: str, content: Any, text: str) -> None:
    assert render(source, content, continue_final_message=True) == text


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("{{ messages[0].content }}", {"add_generation_prompt": True}),
        ("{{ messages[0].role }}", {}),
        ("{{ messages[0].content[:1] }}", {}),
    ],
)
def test_what_cannot_be_continued_is_said(source: str, fields: dict[str, Any]) -> None:
    with pytest.raises(NotExactError):
        render(source, "hi", continue_final_message=True, **fields)


def test_conversations_leave_the_request_as_it_was() -> None:
    call = {"index": 0, "type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = repr(messages)
    (made,) = conversation(messages, "string")
    assert repr(messages) == before
    (ordered,) = made["tool_calls"]
    assert list(ordered) == ["id", "function", "type", "index"]
    assert list(ordered["function"].items()) == [("arguments", {"a": 1}), ("name", "f")]
