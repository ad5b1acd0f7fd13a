"""The layers: which wins, how values are written in each, and what every mistake is told."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from gateway.config import Gateway, Worker
from hotprefix import layers, settings
from hotprefix.schema import leaves

TEXT = """\
listen:
  port: 9000
  host: 127.0.0.1
workers:
  - name: a
    url: http://a:1
  - http://b:1
policy:
  name: prefix
  slack_tokens: 7
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(TEXT)
    return path


def problems(argv: list[str], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(settings.SettingsError) as caught:
        settings.load(argv, environ or {})
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return list(caught.value.problems)


def refused(tmp_path: Path, text: str | bytes) -> list[str]:
    """The problems of a file, without its path."""
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [problem.replace(str(path), "c.yaml") for problem in problems(["--config", str(path)])]


def test_nothing_given_is_the_defaults() -> None:
    loaded = settings.load([], {})
    assert loaded.config == Gateway()
    assert loaded.config.admin.port == 8001  # a section's own default, not its type's
    assert set(loaded.origins.values()) == {"default"}
    assert set(loaded.origins) == set(settings.GATEWAY.leaves)


def test_flags_win_over_variables_over_the_file_over_defaults(file: Path) -> None:
    variable = {"HOTPREFIX_LISTEN_PORT": "9001", "HOTPREFIX_SEED": "5"}
    loaded = settings.load(["--config", str(file), "--listen-port", "9002"], variable)
    assert (loaded.config.listen.port, loaded.config.seed) == (9002, 5)
    assert loaded.origins["listen.port"] == "--listen-port"
    assert loaded.origins["listen.host"] == f"file {file}:3"
    assert loaded.origins["seed"] == "HOTPREFIX_SEED"
    assert loaded.origins["admin.host"] == "default"
    assert settings.load(["--config", str(file)], variable).config.listen.port == 9001
    assert settings.load(["--config", str(file)], {}).config.listen.port == 9000
    assert settings.load([], {"HOTPREFIX_CONFIG": str(file)}).config.listen.port == 9000


def test_a_section_given_in_part_keeps_its_other_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("admin: {host: localhost}\nhealth:\n")
    config = settings.load(["--config", str(path)], {}).config
    assert (config.admin.host, config.admin.port) == ("localhost", 8001)


def test_parts_of_lists_and_maps_have_origins_of_their_own(file: Path) -> None:
    origins = settings.load(["--config", str(file)], {}).origins
    assert origins["workers"] == f"file {file}:4"
    assert origins["workers[0].url"] == f"file {file}:6"
    assert origins["workers[1].url"] == f"file {file}:7"
    assert origins["policy.slack_tokens"] == f"file {file}:10"
    assert "policy.running_tokens" not in origins  # nobody wrote it


def test_a_map_is_replaced_whole(file: Path) -> None:
    loaded = settings.load(["--config", str(file), "--policy", "prefix"], {})
    assert loaded.config.policy == {"name": "prefix"}


URLS = [Worker(name="w0", url="http://a:1"), Worker(name="w1", url="http://[::1]:2")]


@pytest.mark.parametrize(
    "argv",
    [
        ["--workers", "http://a:1,http://[::1]:2"],
        ["--workers=http://a:1, http://[::1]:2"],
        ["--worker-urls", "http://a:1", "http://[::1]:2"],
        ["--worker-urls", "http://a:1", "http://[::1]:2", "--seed", "0"],
        ["--workers", '["http://a:1", "http://[::1]:2"]'],
        ["--workers", '[{"name": "w0", "url": "http://a:1"}, {"name": "w1", "url": "http://[::1]:2"}]'],
        ["--workers", "- http://a:1\n- http://[::1]:2"],
    ],
)
def test_workers_are_written_as_people_write_them(argv: list[str]) -> None:
    assert settings.load(argv, {}).config.workers == URLS
    if argv[0] == "--workers" and len(argv) == 2:
        assert settings.load([], {"HOTPREFIX_WORKERS": argv[1]}).config.workers == URLS


def test_spellings_of_other_routers() -> None:
    loaded = settings.load(["--host", "::1", "--port", "30000", "--policy", "round_robin"], {})
    assert (loaded.config.listen.host, loaded.config.listen.port) == ("::1", 30000)
    assert loaded.config.policy == {"name": "round-robin"}
    assert loaded.origins["listen.port"] == "--port"


def test_a_policy_is_a_name_or_a_map_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("policy: least-loaded\n")
    assert settings.load(["--config", str(path)], {}).config.policy == {"name": "least-loaded"}
    policy = settings.load(["--policy", "{name: prefix, spread_after: 0}"], {}).config.policy
    assert policy == {"name": "prefix", "spread_after": 0}


def test_text_is_text_and_numbers_are_yaml_1_2(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("session_header: no\nkeys_file: 2024-01-01\nupstream: {connect_s: 1e1}\nseed: -3\n")
    config = settings.load(["--config", str(path)], {}).config
    assert (config.session_header, config.keys_file, config.upstream.connect_s) == ("no", "2024-01-01", 10.0)
    config = settings.load(["--session-header", "on", "--seed", "-1"], {"HOTPREFIX_KEYS_FILE": "123"}).config
    assert (config.session_header, config.seed, config.keys_file) == ("on", -1, "123")


def test_an_optional_value_is_taken_back_by_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("keys_file: k\nindex: {bytes: 10_000}\n")
    loaded = settings.load(["--config", str(path)], {"HOTPREFIX_KEYS_FILE": ""})
    assert (loaded.config.keys_file, loaded.config.index.bytes) == (None, 10_000)
    assert loaded.origins["keys_file"] == "HOTPREFIX_KEYS_FILE"


def test_variables_that_are_no_keys_are_left_alone() -> None:
    others = dict.fromkeys(layers.OTHER_VARIABLES, "x") | {
        "HOTPREFIX_CONFIG": "",
        "HOTPREFIXX": "",
        "PATH": "x",
    }
    assert settings.load([], others).config == Gateway()


def test_flags_and_variables_do_not_collide() -> None:
    known = leaves(Gateway).values()
    flags = [leaf.flag for leaf in known] + [*settings.GATEWAY.aliases, "--config", "--json", "--help"]
    variables = [leaf.variable for leaf in known] + [*layers.OTHER_VARIABLES]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables)
    assert set(settings.GATEWAY.aliases.values()) <= set(settings.GATEWAY.leaves)


FILE_MISTAKES = [
    ("listen:\n  prot: 1\n", "c.yaml:2: listen.prot: is no known key (did you mean listen.port?)"),
    ("zzz: 1\n", "c.yaml:1: zzz: is no known key"),
    ("port: 1\n", "c.yaml:1: port: is no known key (did you mean listen.port?)"),
    ("listen.port: 1\n", "c.yaml:1: listen.port: is written as a map, listen: {port: …}"),
    ("seed: 1\nseed: 2\n", "c.yaml:2: seed: is given twice"),
    ("listen: {port: 1}\nlisten: {host: localhost}\n", "c.yaml:2: listen: is given twice"),
    ("policy:\n  name: prefix\n  name: random\n", "c.yaml:3: policy.name: is given twice"),
    ("listen: 8000\n", "c.yaml:1: listen: must be a map of keys to values"),
    ("- 1\n", "c.yaml:1: the file: must be a map of keys to values"),
    ("listen:\n  port: http\n", "c.yaml:2: listen.port: expected int, got str"),
    ("seed: " + "9" * 5_000, "c.yaml:1: seed: is no value that can be read"),
    ("? [a]\n: 1\n", "c.yaml:1: a key must be a word"),
    ("policy: {1: 2}\n", "c.yaml:1: policy: expected str, got int"),
    (
        "workers:\n  - {name: a, url: 'http://a:1', api_key: 5}\n",
        "c.yaml:2: workers[0].api_key: expected str | null, got int",
    ),
    ("seed: 010\n", "c.yaml:1: seed: expected int, got str"),
    ("workers: 5\n", "c.yaml:1: workers: expected array, got int"),
    ("workers:\n  - url: http://a:1\n", "c.yaml:2: workers[0]: object missing required field name"),
    ("workers:\n  - name: a\n    ulr: x\n", "c.yaml:3: workers[0].ulr: is no known key (did you mean url?)"),
    (
        "workers:\n  - {name: a, url: 'http://a:1', events: {endpiont: x}}\n",
        "c.yaml:2: workers[0].events.endpiont: is no known key (did you mean endpoint?)",
    ),
    ("log_level: loud\n", "c.yaml:1: log_level: invalid enum value 'loud'"),
    ("tokens:\n  tokenizers:\n    m: 1\n", "c.yaml:2: tokens.tokenizers: expected str, got int"),
    ("seed: &a 1\nlog_level: *a\n", "c.yaml:2: is not valid YAML: aliases are not accepted"),
    ("seed: [1\n", "c.yaml:2: is not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("a: 1\n---\nb: 2\n", "c.yaml:2: is not valid YAML: but found another document"),
    (
        "seed: !!python/object/apply:os.getpid []\n",
        "c.yaml:1: is not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.getpid'",
    ),
    ("\x00", "c.yaml: is not valid YAML: unreadable"),
    ("[" * 2_000, "c.yaml: is nested too deeply"),
    (b"seed: \xff\n", "c.yaml: is not UTF-8 at byte 6"),
    ("#" * 1_048_577, "c.yaml: is larger than 1048576 bytes; is it the right file?"),
]


@pytest.mark.parametrize(("text", "problem"), FILE_MISTAKES)
def test_mistakes_in_the_file_are_told_with_their_line(
    text: str | bytes, problem: str, tmp_path: Path
) -> None:
    assert refused(tmp_path, text) == [problem]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert problems(["--config", str(path)]) == [f"{path}: cannot be read: No such file or directory"]
    assert problems(["--config", str(tmp_path)]) == [f"{tmp_path}: cannot be read: Is a directory"]


FLAG_MISTAKES = [
    (["--listen-prot", "1"], "--listen-prot: is no flag of hotprefix (did you mean --listen-port?)"),
    (["--listen-prot=1"], "--listen-prot: is no flag of hotprefix (did you mean --listen-port?)"),
    (["serve"], "serve: is not expected here; a flag comes first"),
    (["--seed"], "--seed: needs a value"),
    (["--seed", "--port", "1"], "--seed: needs a value"),
    (["--seed", "1", "--seed", "2"], "--seed: seed is given already, by --seed"),
    (["--port", "1", "--listen-port", "2"], "--listen-port: listen.port is given already, by --port"),
    (["--seed", "x"], "--seed: seed: expected int, got str"),
    (["--seed", ""], "--seed: seed: expected int, got null"),
    (["--seed", "["], "--seed: seed: is not valid YAML or JSON"),
    (["--policy", "{name: prefix, name: random}"], "--policy: policy.name: is given twice"),
    (["--workers", '[{"nam": "a"}]'], "--workers: workers[0].nam: is no known key (did you mean name?)"),
    (["--log-level", "\udcff"], "--log-level: log_level: is not Unicode text"),
    (["--seed", "9" * 30], "--seed: seed: is too large"),
    (["--config"], "--config: needs a path"),
    (["--hit-headers", "maybe"], "--hit-headers: hit_headers: invalid enum value 'maybe'"),
]


@pytest.mark.parametrize(("argv", "problem"), FLAG_MISTAKES)
def test_mistakes_in_flags(argv: list[str], problem: str) -> None:
    assert problems(argv) == [problem]


def test_mistakes_in_variables() -> None:
    environ = {
        "HOTPREFIX_LISTEN_PROT": "1",
        "HOTPREFIX_SEED": "x",
        "HOTPREFIX_HOMR": "x",
        "HOTPREFIX_QQQQQ": "",
    }
    assert problems([], environ) == [
        "HOTPREFIX_HOMR: is no variable of hotprefix (did you mean HOTPREFIX_HOME?)",
        "HOTPREFIX_LISTEN_PROT: is no variable of hotprefix (did you mean HOTPREFIX_LISTEN_PORT?)",
        "HOTPREFIX_QQQQQ: is no variable of hotprefix",
        "HOTPREFIX_SEED: seed: expected int, got str",
    ]


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("foo: 1\nlimits: {requests: 0}\npolicy: {name: prefix, slack: 1}\n")
    found = problems(["--config", str(path), "--seed", "x", "--bar"], {"HOTPREFIX_BAZ": ""})
    assert len(found) == 6


def test_a_mistake_does_not_print_what_was_written(tmp_path: Path) -> None:
    text = "workers:\n  - {name: a, url: 'http://a:1', api_key: [hunter2]}\n  : hunter2: {\n"
    assert not any("hunter2" in problem for problem in refused(tmp_path, text))
    text = "workers:\n  - {name: a, url: 'http://a:1', api_key: [hunter2]}\n"
    assert refused(tmp_path, text) == ["c.yaml:2: workers[0].api_key: expected str | null, got array"]


texts = st.text(
    st.sampled_from("abz:-[]{}!&*|>'\"#%,. \n\t0123456789_?~<=\x85\ud800policyworkerslisten"), max_size=60
)


@settings_of_hypothesis(max_examples=100, deadline=None)
@given(text=texts, key=st.sampled_from(sorted(settings.GATEWAY.leaves)))
def test_whatever_is_written_is_understood_or_refused(text: str, key: str) -> None:
    leaf = settings.GATEWAY.leaves[key]
    for argv, environ in (
        ([leaf.flag, text], {}),
        ([f"{leaf.flag}={text}"], {}),
        ([], {leaf.variable: text}),
    ):
        with contextlib.suppress(settings.SettingsError):
            settings.load(argv, environ)


@settings_of_hypothesis(max_examples=100, deadline=None)
@given(text=st.one_of(texts.map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=40)))
def test_whatever_a_file_holds_is_understood_or_refused(
    text: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(text)
    with contextlib.suppress(settings.SettingsError):
        settings.load(["--config", str(path)], {})
