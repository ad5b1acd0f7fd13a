"""Chat templates: data of a model, never of a request, rendered in a sandbox under a budget.

The environment is the one transformers renders in (immutable sandbox, trimmed blocks, ``break`` and
``continue``, ``tojson`` without escapes), so texts come out as in the engine. Added to it: every loop
turn and every call looks at the clock, and the text is counted as it grows.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes as ast
from jinja2.compiler import CodeGenerator
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.conversation import Format, Message, NotExactError

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where a continued message ends. The engine uses the same word, so that a template which
measures or rewrites its messages does the same there and here."""

RESERVED = frozenset(
    {
        *("self", "conversation", "messages", "chat_template", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens"),
    }
)
"""Arguments of the renderer itself. The engine refuses some of them from a client and others change
what it does; a request that names one is not rendered here."""

_PASSED = frozenset(("tools", "documents", "add_generation_prompt", "continue_final_message"))


class OverBudgetError(Exception):
    """A template ran too long or wrote too much."""


class Template:
    """One compiled template. ``render`` may be called from several threads at once."""

    def __init__(self, source: str, *, clock: Callable[[], float]) -> None:
        """Raises jinja2.TemplateError when ``source`` is no template."""
        environment = _Environment(clock)
        self._environment = environment
        self._source = source
        self._compiled = environment.from_string(source)
        tree = environment.parse(source)
        self._names = jinja2.meta.find_undeclared_variables(tree)
        self.format: Format = content_format(tree)
        self.knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: list[Message],
        variables: Mapping[str, Any],
        special: Mapping[str, str],
        *,
        until: float,
        limit: int,
    ) -> str:
        """The prompt's text. ``variables`` are the request's, ``special`` the tokenizer's named tokens.

        ``messages`` may be changed. Raises NotExactError for what the engine refuses as well,
        OverBudgetError after ``until`` (on the clock) or beyond ``limit`` characters, and
        whatever the template raises.
        """
        if not messages:
            raise NotExactError("messages")
        if not RESERVED.isdisjoint(variables):
            raise NotExactError("chat_template_kwargs")
        given = {name: value for name, value in variables.items() if name in self._names or name in _PASSED}
        given = {"tools": None, "documents": None, "add_generation_prompt": False, **special, **given}
        final = given.pop("continue_final_message", False)
        text = ""
        if final:
            if given["add_generation_prompt"] or "content" not in self._source:
                raise NotExactError("continue_final_message")
            text = _mark(messages[-1])
        rendered = self._environment.write(self._compiled, {"messages": messages, **given}, until, limit)
        return _cut(rendered, text) if final else rendered


def content_format(tree: ast.Template) -> Format:
    """Whether a template walks over the parts of a message's content ("openai") or prints it ("string").

    The same guess as the engine's: names that stand for the messages, loops over those, and in
    them (or in a macro given the content) a loop over ``content``. A template that unpacks one of
    these in an unusual way counts as "string" there, so it does here.
    """
    try:
        lists = _names_of(tree, "messages")
        items = {_plain_name(loop.target) for loop in tree.find_all(ast.For) if _reaches(loop.iter, lists)}
        found = next(_content_loops(tree, items), None)
        if found is not None:
            _plain_name(found.target)
    except _UnusualError:
        return "string"
    return "string" if found is None else "openai"


class _UnusualError(Exception):
    pass


def _plain_name(target: ast.Node) -> str:
    if not isinstance(target, ast.Name):
        raise _UnusualError
    return target.name


def _names_of(tree: ast.Template, name: str) -> set[str]:
    """``name`` and every variable that is set to it, or to a slice or filtered form of it."""
    names, assigned = {name}, list(tree.find_all(ast.Assign))
    while True:
        more = {_plain_name(node.target) for node in assigned if _reaches(node.node, names)} - names
        if not more:
            return names
        names |= more


def _core(node: ast.Node) -> ast.Node:
    """What is left of an expression without filters, tests and slices around it."""
    while True:
        wrapped = isinstance(node, ast.Filter | ast.Test)
        sliced = isinstance(node, ast.Getitem) and isinstance(node.arg, ast.Slice)
        if not (wrapped or sliced) or node.node is None:  # type: ignore[attr-defined]
            return node
        node = node.node  # type: ignore[attr-defined]


def _reaches(node: ast.Node, names: set[str]) -> bool:
    core = _core(node)
    return isinstance(core, ast.Name) and core.ctx == "load" and core.name in names


def _reaches_content(node: ast.Node, items: set[str]) -> bool:
    core = _core(node)
    if isinstance(core, ast.Getattr):
        owner, named = core.node, core.attr
    elif isinstance(core, ast.Getitem) and isinstance(core.arg, ast.Const):
        owner, named = core.node, core.arg.value
    else:
        return False
    ours = isinstance(owner, ast.Name) and owner.ctx == "load" and owner.name in items
    return ours and named == "content"


def _content_loops(tree: ast.Template, items: set[str]) -> Iterator[ast.For]:
    fed: dict[int, set[str]] = {}  # id of a loop in a macro -> parameters that receive content
    for macro in tree.find_all(ast.Macro):
        names = _fed_parameters(tree, macro, items)
        for loop in macro.find_all(ast.For):
            fed[id(loop)] = names or fed.get(id(loop), set())
    for loop in tree.find_all(ast.For):
        name = loop.iter.name if isinstance(loop.iter, ast.Name) else None
        known = fed.get(id(loop), {"content"})  # outside macros, the plain name is enough
        if _reaches_content(loop.iter, items) or name in known:
            yield loop


def _fed_parameters(tree: ast.Template, macro: ast.Macro, items: set[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    fed: set[str] = set()
    for call in tree.find_all(ast.Call):
        if not isinstance(call.node, ast.Name) or call.node.name != macro.name:
            continue
        fed |= {n for n, value in zip(names, call.args, strict=False) if _reaches_content(value, items)}
        fed |= {k.key for k in call.kwargs if k.key in names and _reaches_content(k.value, items)}
    return fed


def _mark(message: Message) -> str:
    """Put the tag behind the text to be continued, and return that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _TAG
        return content
    for part in reversed(content or []):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _TAG
            return text
    raise NotExactError("continue_final_message")


def _cut(rendered: str, text: str) -> str:
    """The rendered text up to the tag; trimmed where the template trimmed the tag's own space."""
    tag = _TAG.strip()
    if text.strip() not in rendered or tag not in rendered:
        raise NotExactError("continue_final_message")
    at = rendered.rindex(tag)
    whole = rendered.startswith(_TAG, at)
    return rendered[:at] if whole else rendered[:at].rstrip()


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks what a model wrote; it adds nothing to the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> ast.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return ast.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


class _Generator(CodeGenerator):
    """Writes our own call in each loop directly: through the sandbox it would cost 5 us a turn, not 0.3."""

    def visit_Call(self, node: ast.Call, frame: Any, forward_caller: bool = False) -> None:
        if isinstance(node.node, ast.EnvironmentAttribute):
            self.visit(node.node, frame)
            self.write("()")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)


class _Environment(ImmutableSandboxedEnvironment):
    """One per template, so that what a template does to it stays with it."""

    code_generator_class = _Generator

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self._clock = clock
        self._thread = threading.local()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _now

    def write(self, template: jinja2.Template, variables: dict[str, Any], until: float, limit: int) -> str:
        self._thread.until = until
        pieces, length = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > limit:
                raise OverBudgetError
        return "".join(pieces)

    def turn(self) -> None:
        """Called once in every turn of every loop, and before every call."""
        if self._clock() > self._thread.until:
            raise OverBudgetError

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.turn()
        return super().call(context, obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> ast.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(ast.For):
            turn = ast.Call(ast.EnvironmentAttribute("turn"), [], [], None, None)
            loop.body.insert(0, ast.ExprStmt(turn).set_lineno(loop.lineno))
        tree.set_environment(self)
        return tree


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
