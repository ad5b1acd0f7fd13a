"""The three places a value can be given in, each read into the same form: a YAML file, the environment,
flags. They say what was given and where; what it must be is ``settings``' business."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from hotprefix.schema import PREFIX, Leaf, nearest

MAX_FILE_BYTES = 1_048_576

NODE_PREFIX = f"{PREFIX}NODE_"

OTHER_VARIABLES = (
    "HOTPREFIX_CONFIG",
    "HOTPREFIX_HOME",
    "HOTPREFIX_NODE_CONFIG",
    "HOTPREFIX_REQUIRE_ENGINES",
    "HOTPREFIX_TEST_ENGINE_URL",
    "HOTPREFIX_TORCH_INDEX",
)
"""Variables that are ours and are not keys of the configuration."""


class Given(msgspec.Struct, frozen=True):
    """A value as it was written. ``origin`` is for people; ``places`` says more exactly where parts
    of it stand, by path (``workers[0].url``)."""

    value: object
    origin: str
    places: Mapping[str, str] = {}

    def place(self, path: str) -> str:
        """Where ``path``, or the nearest thing around it, was written."""
        while path and path not in self.places:
            path = re.sub(r"(\.[^.\[]*|\[\d+\]|^[^.\[]+)$", "", path)
        return self.places.get(path, self.origin)


class Layer(msgspec.Struct):
    """What one place gives, by key, and what is wrong with how it was written, a line each."""

    given: dict[str, Given] = {}
    problems: list[str] = []


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """First letter -> tags of plain scalars and the pattern of each, as YAML 1.2's core schema has it."""
    number = r"(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, letters in (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
        ("float", rf"[-+]?(?:{number}|\.inf|\.nan)", "-+.0123456789"),
    ):
        for letter in letters:
            table.setdefault(letter, []).append((f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})$")))
    return table


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars (``no`` is a word, ``010`` not eight, ``1e3`` a number), no aliases: a
    value stands where it is used, and a small file cannot describe a huge one."""

    yaml_implicit_resolvers = _resolvers()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not accepted", mark)
        return super().compose_node(parent, index)


def from_file(path: str, known: Mapping[str, Leaf]) -> Layer:
    """The file's values. Unreadable, too large, not YAML, and unknown or repeated keys are problems."""
    layer = Layer()
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            return Layer(problems=[f"{path}: is larger than {MAX_FILE_BYTES} bytes; is it the right file?"])
        root = _compose(text.decode())
        if root is not None:
            _Walk(path, known, layer).section(root, "")
    except OSError as error:
        return Layer(problems=[f"{path}: cannot be read: {error.strerror}"])
    except UnicodeDecodeError as error:
        return Layer(problems=[f"{path}: is not UTF-8 at byte {error.start}"])
    except yaml.YAMLError as error:
        return Layer(problems=[_said(error, path)])
    except RecursionError:
        return Layer(problems=[f"{path}: is nested too deeply"])
    return layer


def from_environ(environ: Mapping[str, str], known: Mapping[str, Leaf], begins: str = PREFIX) -> Layer:
    """What variables that begin so give; those that are neither keys nor ``OTHER_VARIABLES`` are
    problems, since a misspelt one would otherwise be ignored silently. A node's are nobody else's."""
    layer = Layer()
    variables = {leaf.variable: leaf for leaf in known.values()}
    for name in sorted(environ):
        if leaf := variables.get(name):
            _take(layer, leaf, environ[name], name)
        elif not name.startswith(begins) or name in OTHER_VARIABLES:
            continue
        elif begins == NODE_PREFIX or not name.startswith(NODE_PREFIX):
            hint = nearest(name, [*variables, *OTHER_VARIABLES], PREFIX)
            layer.problems.append(f"{name}: is no variable of hotprefix{hint}")
    return layer


def from_flags(argv: Sequence[str], known: Mapping[str, Leaf], aliases: Mapping[str, str]) -> Layer:
    """What ``--flag value`` and ``--flag=value`` give. ``aliases``: further flags, each with its key.
    A list takes all words up to the next flag, so that ``--worker-urls A B`` is what it is elsewhere."""
    layer = Layer()
    flags = {leaf.flag: leaf for leaf in known.values()} | {flag: known[key] for flag, key in aliases.items()}
    words = list(argv)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        leaf = flags.get(flag)
        if leaf is None:
            if flag.startswith("-"):
                layer.problems.append(f"{flag}: is no flag of hotprefix{nearest(flag, flags, '--')}")
            else:
                layer.problems.append(f"{flag}: is not expected here; a flag comes first")
            # The word after an unknown flag is its value, not one more mistake.
            if flag.startswith("--") and not equals and words and not words[0].startswith("--"):
                words.pop(0)
            continue
        texts = [text] if equals else []
        while words and not words[0].startswith("--") and (not texts or leaf.many):
            texts.append(words.pop(0))
        if not texts:
            layer.problems.append(f"{flag}: needs a value")
        elif leaf.key in layer.given:
            layer.problems.append(f"{flag}: {leaf.key} is given already, by {layer.given[leaf.key].origin}")
        else:
            _take(layer, leaf, ",".join(texts), flag)
    return layer


def _take(layer: Layer, leaf: Leaf, text: str, origin: str) -> None:
    if leaf.optional and text in ("", "null"):
        layer.given[leaf.key] = Given(None, origin)
    elif leaf.text:
        layer.given[leaf.key] = Given(text, origin)
    else:
        try:
            root = _compose(text)
            if root is not None:
                layer.problems += [
                    f"{origin}: {path}: is given twice" for path, _ in _repeated(root, leaf.key)
                ]
            layer.given[leaf.key] = Given(None if root is None else _value(root), origin)
        except (yaml.YAMLError, RecursionError, ValueError):
            layer.problems.append(f"{origin}: {leaf.key}: is not valid YAML or JSON")


class _Walk:
    """The file's tree against the known keys."""

    def __init__(self, path: str, known: Mapping[str, Leaf], layer: Layer) -> None:
        self._path = path
        self._known = known
        self._layer = layer

    def section(self, node: yaml.Node, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            if not (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
                self._problem(node, f"{prefix.rstrip('.') or 'the file'}: must be a map of keys to values")
            return
        seen: set[str] = set()
        for name, item in node.value:
            key = f"{prefix}{name.value}"
            if not isinstance(name, yaml.ScalarNode):
                self._problem(name, "a key must be a word")
            elif key in seen:
                self._problem(name, f"{key}: is given twice")
            elif key in self._known and "." not in name.value:
                self._leaf(name, item, key)
            elif any(one.startswith(f"{key}.") for one in self._known):
                self.section(item, f"{key}.")
            else:
                self._unknown(name, key, prefix)
            seen.add(key)

    def _leaf(self, name: yaml.Node, item: yaml.Node, key: str) -> None:
        for path, node in _repeated(item, key):
            self._problem(node, f"{path}: is given twice")
        places = {path: f"file {self._at(node)}" for path, node in _nodes(item, key)}
        origin = f"file {self._at(name)}"
        try:
            self._layer.given[key] = Given(_value(item), origin, {**places, key: origin})
        except yaml.YAMLError as error:
            self._layer.problems.append(_said(error, self._path))
        except ValueError:
            self._problem(name, f"{key}: is no value that can be read")

    def _unknown(self, name: yaml.Node, key: str, prefix: str) -> None:
        if key in self._known:
            section, _, last = key.rpartition(".")
            self._problem(name, f"{key}: is written as a map, {section}: {{{last}: …}}")
            return
        siblings = {
            f"{prefix}{one.removeprefix(prefix).split('.')[0]}" for one in self._known if prefix in one
        }
        namesakes = [one for one in self._known if one.rpartition(".")[2] == name.value]
        hint = nearest(key, siblings, prefix) or nearest(key, namesakes or self._known)
        if namesakes and not hint:
            hint = f" (did you mean {namesakes[0]}?)"
        self._problem(name, f"{key}: is no known key{hint}")

    def _problem(self, node: yaml.Node, text: str) -> None:
        self._layer.problems.append(f"{self._at(node)}: {text}")

    def _at(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"


def _compose(text: str) -> yaml.Node | None:
    return yaml.compose(text, Loader=_Loader)


def _value(node: yaml.Node) -> object:
    return _Loader("").construct_document(node)


def _nodes(node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node]]:
    """Every path below ``node``, with the node whose line names it: a map's key, a list's item."""
    if isinstance(node, yaml.MappingNode):
        for name, item in node.value:
            yield f"{path}.{name.value}", name
            yield from _nodes(item, f"{path}.{name.value}")
    elif isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            yield f"{path}[{place}]", item
            yield from _nodes(item, f"{path}[{place}]")


def _repeated(node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node]]:
    seen: set[str] = set()
    for one, where in _nodes(node, path):
        if one in seen:
            yield one, where
        seen.add(one)


def _said(error: yaml.YAMLError, path: str) -> str:
    """Without the excerpt PyYAML would add, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else path
    return f"{where}: is not valid YAML: {getattr(error, 'problem', None) or 'unreadable'}"
