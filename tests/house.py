"""The house rules: who may import whom, and the shape of the code. Each rule is a function from a parsed
file to findings; ``test_house.py`` runs them and shows that each can fail."""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "cacheindex", "cachenode", "policies", "loadtest", "hotprefix")
ROOF = ("tests", "loadtest", "hotprefix")
OUTSIDE = {"config", "config_check", "__main__", "__init__"}
"""Modules of a process that stand outside the floors: what it can be told, and where it starts."""

MAY_IMPORT = {
    "gateway": ("gateway", "cacheindex", "policies"),
    "cacheindex": ("cacheindex",),
    "policies": ("policies",),
    "cachenode": (
        "cachenode",
        "cacheindex.keys",
        "cacheindex.events",
        "cacheindex.client",
        "policies.choice",
        "policies.eviction",
        "policies.admission",
    ),
}
FLOORS: dict[str, dict[int, str]] = {
    "gateway": {
        3: "app admin serve upstream exchange health http",
        2: "route workers tokens stream openai conversation templates tokenizer pool tenants prediction retry "
        "metrics interrupt segments",
    },
    "cacheindex": {
        3: "hub server client source engine_source node_source",
        1: "table feed engine_events engine_state actions pending predicted trust node_feed node_state",
        0: "keys events",
    },
    "cachenode": {
        3: "server publisher client attachment unix_path admin serve connectors",
        2: "store holdings sessions metrics",
        1: "record wire shared arena directory directory_view records coming walk journal keys_file",
    },
    "policies": {0: "choice routing eviction admission"},
}
"""The first part of a module's name inside its package, by floor. A new module needs a place here."""

EDGE = {
    "socket",
    "zmq",
    "aiohttp",
    "httpx",
    "uvicorn",
    "fastapi",
    "requests",
    "urllib",
    "subprocess",
    "select",
}
"""Sockets and other processes: floor 3 alone."""

WORLD = EDGE | {
    "time",
    "datetime",
    "threading",
    "asyncio",
    "concurrent",
    "multiprocessing",
    "os",
    "pathlib",
    "io",
}
"""What vocabulary and decisions (floor 0) must not know: I/O, clock, threads."""

DANGEROUS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
DANGEROUS_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "torch.load", "recv_pyobj", "send_pyobj"}
ENGINE_LIBRARIES = {"torch", "vllm"}

COUNTED = {
    ("gateway/app.py", "__call__"): r"self\._metrics\.ended\(outcome\)",
    ("gateway/health.py", "_watch"): r"self\.errors \+= 1",
    ("gateway/pool.py", "_serve"): r"self\.counts\[.* \+= 1",
    ("cacheindex/hub.py", "_run"): r"self\._errors \+= 1",
    ("cachenode/server.py", "_handle"): r"self\.errors \+= 1",
    ("cachenode/server.py", "_answer"): r"future\.set_exception\(error\)",
    ("cachenode/serve.py", "_run"): r"self\.failure = ",
    ("cachenode/connectors/jobs.py", "_run"): r"self\.errors \+= 1",
    ("loadtest/sim/http.py", "_run"): r"self\._server\.errors \+= 1",
}
"""The roots of tasks and threads that catch everything, each with the line that counts it."""


class Source(NamedTuple):
    """One parsed file; ``path`` is relative to the root, with slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/", maxsplit=1)[0]

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def part(self) -> str:
        """The first part of the name inside the package."""
        return self.path.removesuffix(".py").split("/")[1] if "/" in self.path else ""


Rule = Callable[[Source], Iterator[str]]


def parse(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text))


def tracked() -> list[str]:
    """Files that git knows or would take, so that new ones count before they are committed."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return sorted({name for name in names if name and (ROOT / name).is_file()})


SOURCES = [
    parse(name, (ROOT / name).read_text())
    for name in tracked()
    if name.endswith(".py") and name.split("/")[0] in (*PACKAGES, "tests")
]
KNOWN = {source.module for source in SOURCES}


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(tree: ast.AST) -> list[str]:
    return [name for name in imports(tree) if name.split(".")[0] in (*PACKAGES, "tests")]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def floor_of(package: str, part: str) -> int | None:
    """None outside the floors."""
    table = FLOORS.get(package, {})
    return next((floor for floor, parts in table.items() if part in parts.split()), None)


def packages_import_only_what_they_may(source: Source) -> Iterator[str]:
    for name in ours(source.tree) if source.package not in ROOF else ():
        if not any(within(name, allowed) for allowed in MAY_IMPORT[source.package]):
            yield f"{source.package} must not import {name}"


def arrows_go_down(source: Source) -> Iterator[str]:
    mine = floor_of(source.package, source.part)
    for name in ours(source.tree) if mine is not None else ():
        package, _, rest = name.partition(".")
        theirs = floor_of(package, rest.split(".")[0])
        if theirs is not None and mine is not None and theirs > mine:
            yield f"floor {mine} must not import {name} of floor {theirs}"


def every_module_has_a_floor(source: Source) -> Iterator[str]:
    if (
        source.package in FLOORS
        and source.part not in OUTSIDE
        and floor_of(source.package, source.part) is None
    ):
        yield f"{source.module} has no place in FLOORS"


def the_world_stays_at_the_edge(source: Source) -> Iterator[str]:
    floor = floor_of(source.package, source.part)
    forbidden = {None: set[str](), 0: WORLD, 1: EDGE, 2: EDGE, 3: set[str]()}[floor]
    yield from (
        f"floor {floor} must not import {name}"
        for name in imports(source.tree)
        if name.split(".")[0] in forbidden
    )


def engine_libraries_stay_in_connectors(source: Source) -> Iterator[str]:
    """Scripts under tests/ that an engine's Python runs are not ours to keep free of it."""
    if source.package != "tests" and not source.path.startswith("cachenode/connectors/"):
        yield from (f"imports {n}" for n in imports(source.tree) if n.split(".")[0] in ENGINE_LIBRARIES)


def project_modules_are_imported_at_the_top(source: Source) -> Iterator[str]:
    for function in functions(source.tree):
        yield from (f"{function.name} imports {name}" for name in ours(function))


def nothing_is_global(source: Source) -> Iterator[str]:
    yield from (f"line {n.lineno}: global" for n in ast.walk(source.tree) if isinstance(n, ast.Global))


def nothing_executes_data(source: Source) -> Iterator[str]:
    yield from (f"imports {name}" for name in imports(source.tree) if name.split(".")[0] in DANGEROUS)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in DANGEROUS_CALLS or called.rpartition(".")[2] in {"recv_pyobj", "send_pyobj"}:
                yield f"line {node.lineno} calls {called}"


def files_and_functions_are_short(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > 400:
        yield f"has {lines} lines, at most 400"
    for function in functions(source.tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > 50:
            yield f"{function.name} has {length} lines, at most 50"


def functions_are_annotated(source: Source) -> Iterator[str]:
    for function in functions(source.tree):
        arguments = function.args
        given = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ]
        bare = [a.arg for a in given if a and a.annotation is None and a.arg not in {"self", "cls"}]
        if bare or (function.returns is None and function.name != "__init__"):
            yield f"{function.name}: no annotation of {', '.join(bare) or 'its result'}"


def catching_everything_is_counted(source: Source) -> Iterator[str]:
    for function in functions(source.tree):
        body = ast.unparse(function)
        for node in ast.walk(function):
            if not isinstance(node, ast.ExceptHandler) or not catches_all(node):
                continue
            last = node.body[-1]
            if isinstance(last, ast.Raise) and last.exc is None:
                continue
            counter = COUNTED.get((source.path, function.name))
            if counter is None:
                yield f"line {node.lineno}: {function.name} catches everything and is not in COUNTED"
            elif not re.search(counter, body):
                yield f"line {node.lineno}: {function.name} does not count: no {counter}"


def catches_all(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    if caught is None:
        return True
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(ast.unparse(name) in {"Exception", "BaseException"} for name in names)


def no_test_sleeps_or_patches(source: Source) -> Iterator[str]:
    if source.package != "tests":
        return
    yield from (f"imports {name}" for name in imports(source.tree) if within(name, "unittest.mock"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            moment = (
                isinstance(node.args[0], ast.Constant) and node.args[0].value == 0 if node.args else False
            )
            if called in {"time.sleep", "sleep"} or (called == "asyncio.sleep" and not moment):
                yield f"line {node.lineno} sleeps: wait for a condition"
            if "mock" in called.split("."):
                yield f"line {node.lineno} patches: write a fake"


RULES: list[Rule] = [
    packages_import_only_what_they_may,
    arrows_go_down,
    every_module_has_a_floor,
    the_world_stays_at_the_edge,
    engine_libraries_stay_in_connectors,
    project_modules_are_imported_at_the_top,
    nothing_is_global,
    nothing_executes_data,
    files_and_functions_are_short,
    functions_are_annotated,
    catching_everything_is_counted,
    no_test_sleeps_or_patches,
]


def graph(sources: list[Source], known: set[str]) -> dict[str, set[str]]:
    """Who imports whom; a name that is no module is one inside a module."""
    found: dict[str, set[str]] = {}
    for source in sources:
        names = ours(source.tree)
        targets = {name if name in known else name.rpartition(".")[0] for name in names}
        found[source.module] = targets - {source.module}
    return found


def unregistered(policies: list[Source], table: Source) -> list[str]:
    """Files with a policy (a class with ``choose``, not the contract itself) that the table leaves out."""
    listed = set(ours(table.tree))
    chosen = [
        source for source in policies if source.part == "routing" and not source.path.endswith("base.py")
    ]
    return [
        s.path
        for s in chosen
        if any(f.name == "choose" for f in functions(s.tree)) and s.module not in listed
    ]


MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+|tmp/" + r"hp|opt/(?:pypi|wheels))(?=[/\s\"'`]|$)"
)
