"""Our ids are the engine's, token for token, over the table in ``token_table``.

Twice: against vLLM's render server without weights, in one process for all set-ups (other templates,
tokenizers that add tokens or cut on the left, other flags), and against a real serving engine.
"""

import asyncio
import json
import os
import shutil
import subprocess
from array import array
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gateway import config
from gateway.openai import ApiError, Endpoint, parse
from gateway.templates import Template
from gateway.tokenizer import Rendering
from gateway.tokens import Prompt, Tokenizers
from hotprefix.home import Home
from tests.engines.token_table import CHAT, COMPLETIONS, PLAIN, REFUSED, SETUPS, TEXTS, Body, Setup

HERE = Path(__file__).parent
ROOM = 4096
TOKENIZE = {"messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"}
TOKENIZE |= {
    "chat_template_kwargs",
    "echo",
}  # what /tokenize reads; it does not know reasoning_content either


class Rendered(msgspec.Struct):
    """What vLLM's render server said: per set-up, (path, body, status, answer) of every request."""

    rows: dict[str, list[tuple[str, Body, int, Any]]]
    formats: list[str]
    folders: dict[str, Path]


def requests_of(setup: Setup) -> list[tuple[str, Body]]:
    chats = [(CHAT, body) for body in setup.chats]
    texts = [(COMPLETIONS, body) for body in setup.texts]
    refused = [(CHAT, body) for body in REFUSED] if setup.name == "plain" else []
    tokenize = [("/tokenize", body) for body in setup.chats if set(body) <= TOKENIZE and setup.template]
    return chats + texts + refused + [row for row in tokenize if "reasoning_content" not in str(row)]


def model_folder(setup: Setup, model: Path, at: Path) -> Path:
    """The model without weights, with the set-up's tokenizer and named templates."""
    at.mkdir()
    for file in model.iterdir():
        if file.suffix == ".json" or (file.suffix == ".jinja" and not setup.named):
            shutil.copy(file, at)
    settings = json.loads((at / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    settings["truncation_side"] = "right"  # the engine cuts on the left all the same
    (at / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, file in setup.named.items():
        target = at / "chat_template.jinja"
        if name != "default":
            target = at / "additional_chat_templates" / f"{name}.jinja"
            target.parent.mkdir(exist_ok=True)
        shutil.copy(HERE / "templates" / file, target)
    if setup.adds_tokens:
        tokenizer = json.loads((at / "tokenizer.json").read_text())
        around = [{"SpecialToken": {"id": word, "type_id": 0}} for word in ("<|im_start|>", "<|im_end|>")]
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [around[0], {"Sequence": {"id": "A", "type_id": 0}}, around[1]],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                word: {"id": word, "ids": [number], "tokens": [word]}
                for number, word in ((1, "<|im_start|>"), (2, "<|im_end|>"))
            },
        }
        (at / "tokenizer.json").write_text(json.dumps(tokenizer))
    return at


def engine_templates(home: Home) -> list[str]:
    """The templates that come with the engine, and ours: a trial for the guess at their content format."""
    shipped = home.engine.glob("lib/python3*/site-packages/vllm/transformers_utils/chat_templates/*.jinja")
    files = [*sorted(shipped), *sorted((HERE / "templates").glob("*.jinja"))]
    loops = [
        "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m['content'] | list %}{{ c }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}{% for c in content %}x{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set text = m.content %}{% for c in text %}x{% endfor %}{% endfor %}",
        "{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}x{% endfor %}{% endfor %}",
        "{% set last = messages[0] %}{% for c in last.content %}x{% endfor %}",
        "{% macro f(x) %}{% for c in x %}x{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}"
        "{% endfor %}",
        "{% macro f(content) %}{% for c in content %}x{% endfor %}{% endmacro %}{{ f('a') }}",
        "{% macro f(y, x=1) %}{% for c in x %}x{% endfor %}{% endmacro %}{% for m in messages %}"
        "{{ f(1, x=m['content']) }}{% endfor %}",
        "{% for i, m in messages | items %}{% for c in m.content %}x{% endfor %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.all = messages %}{% for m in messages %}{% for c in m.content %}x"
        "{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ]
    return [file.read_text() for file in files] + loops


@pytest.fixture(scope="module")
def rendered(home: Home, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    root = tmp_path_factory.mktemp("models")
    folders = {setup.name: model_folder(setup, Path(model_path), root / setup.name) for setup in SETUPS}
    asked = {"setups": [], "templates": engine_templates(home)}
    for setup in SETUPS:
        flags = list(setup.flags)
        if setup.template is not None:
            flags += ["--chat-template", str(HERE / "templates" / setup.template)]
        model = str(folders[setup.name])
        asked["setups"].append({"model": model, "flags": flags, "requests": requests_of(setup)})
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    done = subprocess.run(
        [home.engine / "bin" / "python", HERE / "render_rows.py"],
        input=json.dumps(asked),
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    rows = {
        setup.name: [
            (path, body, *answer) for (path, body), answer in zip(requests_of(setup), found, strict=True)
        ]
        for setup, found in zip(SETUPS, said["answers"], strict=True)
    }
    return Rendered(rows, said["formats"], folders)


def ids_of(path: str, answer: Any) -> list[list[int]]:
    if path == "/tokenize":
        return [answer["tokens"]]
    entries = answer if isinstance(answer, list) else [answer]
    return [entry["token_ids"] for entry in entries]


async def ours(tokenizers: Tokenizers, path: str, body: Body) -> list[Prompt]:
    endpoint: Endpoint = "completions" if path == COMPLETIONS else "chat"
    request = parse(endpoint, json.dumps(body).encode())
    room = None if path == "/tokenize" else ROOM
    return await tokenizers.prompts(endpoint, "m", request, room)


def shown(body: Body) -> str:
    return json.dumps(body, ensure_ascii=False)[:400]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
async def test_our_ids_are_the_render_servers(rendered: Rendered, setup: Setup) -> None:
    given = dict(setup.rendering)
    if setup.template is not None:
        given["chat_template"] = str(HERE / "templates" / setup.template)
    tokenizers = Tokenizers(config.Tokens(deadline_s=30.0))
    await tokenizers.load("m", str(rendered.folders[setup.name]), msgspec.convert(given, Rendering))
    assert tokenizers.known("m"), tokenizers.why_not("m")
    wrong, compared = [], 0
    for path, body, status, answer in rendered.rows[setup.name]:
        try:
            prompts = await ours(tokenizers, path, body)
        except ApiError:
            assert status >= 400, shown(body)
            continue
        if status != 200:
            continue
        compared += 1
        expected = ids_of(path, answer)
        if [p.kind for p in prompts] != ["tokens"] * len(expected):
            wrong.append(f"{path} {shown(body)}\n  not exact: {[p.reason for p in prompts]}")
        elif (found := [list(p.tokens) for p in prompts]) != expected:
            wrong.append(f"{path} {shown(body)}\n  engine {str(expected)[:400]}\n  ours   {str(found)[:400]}")
    tokenizers.close()
    assert not wrong, f"{len(wrong)} of {compared}:\n" + "\n".join(wrong)
    assert compared >= len(setup.chats + setup.texts) * 0.8


async def test_what_the_engine_refuses_harms_nobody(rendered: Rendered) -> None:
    tokenizers = Tokenizers(config.Tokens())
    await tokenizers.load("m", str(rendered.folders["plain"]))
    statuses = {shown(body): status for _, body, status, _ in rendered.rows["plain"]}
    for body in REFUSED:
        assert statuses[shown(body)] >= 400, shown(body)
        with_ids = await ours(tokenizers, CHAT, body)
        assert len(with_ids) == 1
    tokenizers.close()


def test_content_formats_are_guessed_as_the_engine_does(rendered: Rendered, home: Home) -> None:
    templates = engine_templates(home)
    guesses = [Template(text, clock=lambda: 0.0).format for text in templates]
    assert guesses == rendered.formats
    assert set(guesses) == {"string", "openai"}


async def test_our_ids_are_a_serving_engines(engine_url: str, model_path: str) -> None:
    tokenizers = Tokenizers(config.Tokens(deadline_s=30.0))
    await tokenizers.load("m", model_path)
    async with httpx.AsyncClient(base_url=engine_url, timeout=60.0, trust_env=False) as client:
        room = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        for path, bodies in ((CHAT, PLAIN), (COMPLETIONS, TEXTS), ("/tokenize", PLAIN)):
            for body in bodies:
                if path == "/tokenize" and not set(body) <= TOKENIZE:
                    continue
                answer = await client.post(path, json={"model": "smollm2", **body})
                if answer.status_code != 200:
                    continue
                endpoint: Endpoint = "completions" if path == COMPLETIONS else "chat"
                request = parse(endpoint, json.dumps(body).encode())
                prompts = await tokenizers.prompts(endpoint, "m", request, room)
                assert [list(p.tokens) for p in prompts] == ids_of(path, answer.json()), shown(body)
    tokenizers.close()


async def test_the_engine_counts_the_tokens_we_count(engine_url: str, model_path: str) -> None:
    """Not only its render endpoint: what it says it computed for a request it served."""
    tokenizers = Tokenizers(config.Tokens())
    await tokenizers.load("m", model_path)
    async with httpx.AsyncClient(base_url=engine_url, timeout=60.0, trust_env=False) as client:
        counted = []
        for endpoint, path, bodies in (("chat", CHAT, PLAIN[:6]), ("completions", COMPLETIONS, TEXTS[:5])):
            for body in bodies:
                asked = {"model": "smollm2", "max_tokens": 1, **body}
                answer = await client.post(path.removesuffix("/render"), json=asked)
                prompts = await tokenizers.prompts(
                    endpoint, "m", parse(endpoint, json.dumps(asked).encode()), 4096
                )
                counted.append((sum(p.count for p in prompts), answer.json()["usage"]["prompt_tokens"]))
    tokenizers.close()
    assert all(we == engine for we, engine in counted), counted
    assert isinstance(prompts[0].tokens, array)
    assert asyncio.get_running_loop().is_running()
