"""The house rules held against the code, and each rule shown to fail on a bad snippet."""

import re
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.house import (
    COUNTED,
    KNOWN,
    MACHINE_PATH,
    ROOT,
    RULES,
    SOURCES,
    Rule,
    arrows_go_down,
    catching_everything_is_counted,
    engine_libraries_stay_in_connectors,
    every_module_has_a_floor,
    files_and_functions_are_short,
    functions_are_annotated,
    graph,
    no_test_sleeps_or_patches,
    nothing_executes_data,
    nothing_is_global,
    packages_import_only_what_they_may,
    parse,
    project_modules_are_imported_at_the_top,
    the_world_stays_at_the_edge,
    tracked,
    unregistered,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Rule) -> None:
    assert [f"{source.path}: {finding}" for source in SOURCES for finding in rule(source)] == []


def test_no_imports_go_in_circles() -> None:
    TopologicalSorter(graph(SOURCES, KNOWN)).prepare()
    two = [parse("gateway/a.py", "from gateway.b import B"), parse("gateway/b.py", "import gateway.a")]
    with pytest.raises(CycleError):
        TopologicalSorter(graph(two, {"gateway.a", "gateway.b"})).prepare()


def test_every_policy_is_in_the_table() -> None:
    table = next(source for source in SOURCES if source.path == "policies/routing/__init__.py")
    assert unregistered([source for source in SOURCES if source.package == "policies"], table) == []
    stray = parse("policies/routing/stray.py", "class Stray:\n def choose(self): ...")
    assert unregistered([stray], table) == ["policies/routing/stray.py"]


def test_the_map_names_every_module() -> None:
    """Folders such as ``loadtest/sim`` as one, policies each by its own name."""
    named = set(re.findall(r"`([\w/]+?)/?`", (ROOT / "docs/structures.md").read_text()))
    code = [source for source in SOURCES if source.package != "tests" and source.part != "__init__"]
    parts = {s.module.split(".")[-1] if s.package == "policies" else s.part for s in code}
    assert parts - named - {"routing"} == set()


def test_no_paths_of_a_machine() -> None:
    found = []
    for name in tracked():
        content = (ROOT / name).read_bytes()
        if b"\0" not in content:
            found += [f"{name}: {hit}" for hit in MACHINE_PATH.findall(content.decode())]
    assert found == []
    assert MACHINE_PATH.search("cd /" + "work/main")
    assert not MACHINE_PATH.search("the /workers page")


BAD: list[tuple[Rule, str, str]] = [
    (packages_import_only_what_they_may, "cacheindex/x.py", "from gateway import app"),
    (packages_import_only_what_they_may, "policies/x.py", "from cacheindex.keys import Key"),
    (packages_import_only_what_they_may, "gateway/x.py", "import loadtest.simengine"),
    (packages_import_only_what_they_may, "cachenode/x.py", "from cacheindex.table import Table"),
    (arrows_go_down, "gateway/route.py", "from gateway.app import App"),
    (arrows_go_down, "cacheindex/keys.py", "from cacheindex import table"),
    (every_module_has_a_floor, "gateway/novel.py", ""),
    (the_world_stays_at_the_edge, "policies/routing/x.py", "import time"),
    (the_world_stays_at_the_edge, "gateway/route.py", "import aiohttp"),
    (engine_libraries_stay_in_connectors, "gateway/x.py", "import torch.nn"),
    (project_modules_are_imported_at_the_top, "hotprefix/x.py", "def f():\n from gateway import app"),
    (nothing_is_global, "gateway/x.py", "def f():\n global n\n n = 1"),
    (nothing_executes_data, "gateway/x.py", "import pickle"),
    (nothing_executes_data, "gateway/x.py", "yaml.load(text)"),
    (nothing_executes_data, "gateway/x.py", "self.socket.recv_pyobj()"),
    (nothing_executes_data, "gateway/x.py", "eval('1')"),
    (files_and_functions_are_short, "gateway/x.py", "x = 1\n" * 401),
    (files_and_functions_are_short, "gateway/x.py", "def f():\n" + " x = 1\n" * 50),
    (functions_are_annotated, "gateway/x.py", "def f(a) -> None: ..."),
    (functions_are_annotated, "gateway/x.py", "def f(self): ..."),
    (catching_everything_is_counted, "gateway/x.py", "def f():\n try: g()\n except Exception: n += 1"),
    (
        catching_everything_is_counted,
        "gateway/x.py",
        "def f():\n try: g()\n except (OSError, BaseException): h()",
    ),
    (catching_everything_is_counted, "gateway/health.py", "def _watch():\n try: g()\n except: pass"),
    (no_test_sleeps_or_patches, "tests/x.py", "time.sleep(1)"),
    (no_test_sleeps_or_patches, "tests/x.py", "await asyncio.sleep(0.1)"),
    (no_test_sleeps_or_patches, "tests/x.py", "from unittest.mock import patch"),
    (no_test_sleeps_or_patches, "tests/x.py", "mock.patch('a')"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_each_rule_can_fail(rule: Rule, path: str, text: str) -> None:
    assert list(rule(parse(path, text)))


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


def test_the_tables_name_nothing_that_is_gone() -> None:
    paths = {source.path for source in SOURCES}
    assert {path for path, _ in COUNTED} <= paths
