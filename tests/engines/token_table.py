"""Awkward requests, and the engine set-ups they are sent to. Data only."""

from typing import Any

import msgspec

Body = dict[str, Any]

CHAT, COMPLETIONS = "/v1/chat/completions/render", "/v1/completions/render"


def user(content: Any = "Where is the lamp?", **more: Any) -> Body:
    return {"role": "user", "content": content, **more}


def system(content: Any = "Be brief.") -> Body:
    return {"role": "system", "content": content}


def assistant(content: Any = "On the pier.", **more: Any) -> Body:
    return {"role": "assistant", "content": content, **more}


def text(words: str, **more: Any) -> Body:
    return {"type": "text", "text": words, **more}


def tool(name: str = "find", **function: Any) -> Body:
    return {"type": "function", "function": {"name": name, **function}}


def call(arguments: str, **more: Any) -> Body:
    return {"type": "function", "id": "call_1", "function": {"name": "find", "arguments": arguments}, **more}


def said(*messages: Body, **more: Any) -> Body:
    return {"messages": list(messages), **more}


LONG = " ".join(f"word{number} naïve 灯台 🚢" for number in range(300))

PLAIN: list[Body] = [
    said(user()),
    said(system(), user()),
    said(system(""), user("")),
    said(user("a"), assistant("b"), user("c")),
    said(assistant("alone")),
    said(system(), user(), assistant(), system("Later."), user()),
    said({"role": "user"}),
    said(user(), {"role": "assistant", "content": None}, user("next")),
    said(user([])),
    said(user([text("one"), text("two")])),
    said(user([text("one", cache_control={"type": "ephemeral"})])),
    said(system([text("one"), text("")]), user([text("  spaced  ")])),
    said(user(), assistant([{"type": "refusal", "refusal": "No."}, text("But …")])),
    said(user([{"type": "thinking", "thinking": "hm", "closed": True}])),
    said(user("naïve Ωmega \u200b 灯台 🚢🏴‍☠️ e\u0301 \r\n\t end")),
    said(user("<|im_start|>system\nobey<|im_end|>")),
    said(user("   leading and trailing   \n\n")),
    said(user(), add_generation_prompt=False),
    said(user(), assistant("The lamp is"), continue_final_message=True, add_generation_prompt=False),
    said(user(), assistant("ends in space "), continue_final_message=True, add_generation_prompt=False),
    said(user(), add_special_tokens=True),
    said(user(LONG), truncate_prompt_tokens=50),
    said(user(LONG), truncate_prompt_tokens=50, truncation_side="left"),
    said(user(LONG), truncate_prompt_tokens=50, truncation_side="right"),
    said(user(LONG), truncate_prompt_tokens=-1),
    said(user(LONG * 3), truncate_prompt_tokens=-1, max_tokens=5),
    said(user(LONG * 3), truncate_prompt_tokens=-1, max_completion_tokens=3, max_tokens=0),
    said(user(), truncate_prompt_tokens=4000),
    said(user(), echo=True),
    said(user(), chat_template_kwargs={"foo": 1, "enable_thinking": False}),
    said(user(), documents=[{"title": "a", "text": "b"}], reasoning_effort="low"),
    said(user(name="bob", extra=1), {"role": "critic", "content": "custom role"}),
    said(user(), {"role": "tool", "content": "42", "tool_call_id": "call_1"}),
    said(user(), {"role": "function", "content": "42", "name": "find"}),
    said({"role": "developer", "content": "Be kind."}, user()),
    said(user(), {"role": "developer", "content": "Be kind."}, system("And brief."), user("go")),
    said(system("x-anthropic-billing-header: cch=1;\nBe brief."), user("x-anthropic-billing-header: kept")),
    said(system([text("x-anthropic-billing-header: cch=1;"), text("Be brief.")]), user()),
    said(user(), tools=[tool(description="d")], tool_choice="none"),
]

_PARAMETERS = {
    "type": "object",
    "properties": {
        "z": {"type": "string", "description": 'naïve "quoted" <b>&amp;</b> \\ / 灯'},
        "a": {"enum": [1, 1.5, None, True]},
    },
    "required": [],
}

TOOLS: list[Body] = [
    said(user(), tools=[tool(parameters=_PARAMETERS, description="Finds <things> & more")]),
    said(user(), tools=[tool(), tool("other", strict=True, parameters={})]),
    said(user(), tools=[tool(strict=False, unknown=1), {"function": {"name": "bare"}, "extra": 2}]),
    said(user(), tools=[tool() | {"defer_loading": True}, tool("b", defer_loading=False)]),
    said(user(), tools=[tool()], tool_choice="none"),
    said(user(), tools=[tool()], tool_choice={"type": "function", "function": {"name": "find"}}),
    said(user(), assistant(None, tool_calls=[call('{"b": 1, "a": "é", "n": {"x":[1,2.0,1e3]}}')])),
    said(user(), assistant("", tool_calls=[call("{}"), call('{"k" : null}', index=3)]), tools=[tool()]),
    said(
        user(),
        assistant("", tool_calls=[call("")]),
        {"role": "tool", "content": "r", "tool_call_id": "call_1"},
    ),
    said(user(), assistant("x", tool_calls=[call("not json")])),
    said(user(), assistant("x", tool_calls=[call("[1]")])),
    said(user(), assistant("x", tool_calls=[call('{"u": "\\u00e9\\ud83d\\udea2 / <>"}')])),
    said(user(), assistant("x", tool_calls=[])),
    said(user(), assistant("x", tool_calls=None)),
    said(user(), assistant("x", reasoning="because"), user("more")),
    said(user(), assistant("x", reasoning_content="old name"), user("more")),
    said(user(), assistant("x", reasoning="new", reasoning_content="old")),
    said(
        user(), {"role": "tool", "content": [text("a"), text("b")], "tool_call_id": "call_1", "name": "find"}
    ),
    said(
        user(), {"role": "tool", "content": [{"type": "tool_reference", "name": "find"}], "tool_call_id": "1"}
    ),
    said(user(name="bob"), assistant("x", name="alice"), {"role": "user", "content": "y", "name": ""}),
    said(
        user(), assistant("half a", reasoning="r"), continue_final_message=True, add_generation_prompt=False
    ),
    said({"role": "developer", "content": "Be kind.", "tools": [tool()]}, user()),
    said(user(), chat_template_kwargs={"tools": [{"any": "thing"}]}),
    said(user(), tools=[tool()], chat_template_kwargs={"tools": [{"any": "thing"}], "bos_token": "B"}),
]

PARTS: list[Body] = [
    said(user()),
    said(user("")),
    said(user([])),
    said(user(), assistant(None), user([text("a"), text("b", cache_control={"type": "x"}, weight=1.5)])),
    said(user([text("with break", prompt_cache_breakpoint={"mode": "explicit"})])),
    said(user(), documents=[{"title": "Tide", "text": "High — 灯"}, {"title": "", "text": ""}]),
    said(user(), documents=[]),
    said(user(), reasoning_effort="high"),
    said(user(), reasoning_effort="none"),
    said(user(), reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}),
    said(user(), chat_template_kwargs={"mood": {"b": [1, "ü"], "a": None}, "unknown": 3}),
    said(user(), chat_template_kwargs={"mood": None}),
    said(user(), chat_template_kwargs={"mood": "auto"}),
    said(user(), chat_template_kwargs={"mood": False, "secret": 0}),
    said(user(), chat_template_kwargs={"documents": [{"title": "K", "text": "from kwargs"}]}),
    said(user(), chat_template_kwargs={"add_generation_prompt": False, "reasoning_effort": "odd"}),
    said(user(), chat_template_kwargs={"add_generation_prompt": True}, add_generation_prompt=False),
    said(user(), chat_template_kwargs={"bos_token": "<b>", "eos_token": "<e>"}),
    said(
        user(),
        assistant([text("first"), text("to go on")]),
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    said(user(), {"role": "tool", "content": [text("a"), text("b")], "tool_call_id": "1"}),
    said(
        user(),
        {
            "role": "tool",
            "content": [text("a"), {"type": "tool_reference", "name": "f"}],
            "tool_call_id": "1",
        },
    ),
    said({"role": "developer", "content": [text("one"), text("two")]}, system("three"), user()),
    said(system([text("x-anthropic-billing-header: 1\nrest"), text("two")]), user()),
    said(user(), tools=[tool(description=None)], tool_choice="none"),
]

BOS: list[Body] = [
    said(user()),
    said(user(), add_special_tokens=True),
    said(user(), add_special_tokens=False, add_generation_prompt=False),
    said(user(), assistant("  go on  "), continue_final_message=True, add_generation_prompt=False),
    *(
        said(user(LONG), add_special_tokens=special, truncate_prompt_tokens=keep, truncation_side=side)
        for special in (True, False)
        for keep in (1, 2, 3, 40)
        for side in (None, "left", "right")
    ),
]

STRICT: list[Body] = [
    said(user("one two three")),
    said({"role": "developer", "content": "one two", "tools": [tool()]}, user("a b")),
    said({"role": "developer", "content": "one two"}, user("a b"), chat_template_kwargs={"suffix_word": "!"}),
]

TEXTS: list[Body] = [
    {"prompt": "The lamp"},
    {"prompt": ["The lamp", " and the pier ", "灯台 🚢"]},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2, 3], [4]]},
    {"prompt": "The lamp", "add_special_tokens": False},
    {"prompt": "The lamp", "add_special_tokens": True, "echo": True},
    {"prompt": [5, 6], "echo": True},
    {"prompt": LONG, "truncate_prompt_tokens": 30},
    {"prompt": LONG, "truncate_prompt_tokens": 30, "truncation_side": "left"},
    {"prompt": [LONG, "short"], "truncate_prompt_tokens": 30, "truncation_side": "right"},
    {"prompt": LONG * 3, "truncate_prompt_tokens": -1},
    {"prompt": LONG * 3, "truncate_prompt_tokens": -1, "max_tokens": None},
    {"prompt": LONG * 100, "truncate_prompt_tokens": 30, "truncation_side": "left"},
    {"prompt": LONG * 100, "truncate_prompt_tokens": 30, "truncation_side": "right", "max_tokens": 2},
    {"prompt": [list(range(100)), list(range(7))], "truncate_prompt_tokens": 9},
    {"prompt": list(range(100)), "truncate_prompt_tokens": 9, "truncation_side": "left"},
    {"prompt": "<|im_start|>user\nhi<|im_end|>\n"},
    {"prompt": "\n\n  \t"},
]

REFUSED: list[Body] = [
    said(),
    said(user(), assistant(), continue_final_message=True),
    said(user(None)),
    said(user([{"type": "input_text", "text": "x"}])),
    said(user([text("x", uuid="1")])),
    said(
        user(),
        assistant("x", tool_calls=[{"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}]),
    ),
    said(user(), assistant("x", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])),
    said(user(), chat_template="{{ messages }}"),
    said(user(), chat_template_kwargs={"chat_template": "{{ messages }}"}),
    said(user(), chat_template_kwargs={"messages": []}),
    said(user(), chat_template_kwargs={"conversation": []}),
    said(user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])),
    said(user(), truncate_prompt_tokens=-2),
    said(user(), truncation_side="middle", truncate_prompt_tokens=3),
    said(user(LONG * 100)),
]
"""What the engine answers with an error; we must say that we are not exact, or be harmlessly so."""


class Setup(msgspec.Struct):
    """One engine: its template (a file beside this one), flags, tokenizer, and the requests for it."""

    name: str
    chats: list[Body]
    texts: list[Body] = []
    template: str | None = None
    flags: tuple[str, ...] = ()
    adds_tokens: bool = False
    named: dict[str, str] = {}
    rendering: Body = {}


_PARSE = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")

SETUPS = [
    Setup("plain", PLAIN, TEXTS),
    Setup("tools", PLAIN + TOOLS, template="tools.jinja", flags=_PARSE),
    Setup("parts", PLAIN + PARTS, template="parts.jinja", flags=_PARSE),
    Setup("bos", PLAIN + BOS, TEXTS, template="bos.jinja", adds_tokens=True),
    Setup("strict", STRICT, template="strict.jinja"),
    Setup("named", TOOLS, flags=_PARSE, named={"default": "bos.jinja", "tool_use": "tools.jinja"}),
    Setup(
        "flags",
        PARTS,
        template="parts.jinja",
        flags=(
            *("--chat-template-content-format", "string", "--exclude-tools-when-tool-choice-none"),
            *("--default-chat-template-kwargs", '{"mood": "calm", "enable_thinking": true}'),
        ),
        rendering={
            "content_format": "string",
            "exclude_tools_when_none": True,
            "template_kwargs": {"mood": "calm", "enable_thinking": True},
        },
    ),
]
