"""The gateway before two real vLLM engines."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.tenants import new_key
from hotprefix.engines import Engine, Fleet
from hotprefix.local_gateway import LocalGateway
from loadtest.harness import wait_until

BLOCK = 32
CHAT = "/v1/chat/completions"

Start = Callable[..., "Client"]


class Client:
    """A client of one gateway, and what it knows of its workers."""

    def __init__(self, gateway: LocalGateway) -> None:
        self.gateway = gateway
        self.http = httpx.Client(base_url=gateway.url, timeout=300, trust_env=False)

    def chat(self, messages: list[dict[str, str]], key: str = "", **fields: Any) -> httpx.Response:
        body = {"model": "smollm2", "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = self.http.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def workers(self) -> dict[str, Any]:
        answer = httpx.get(self.gateway.admin_url + "/v1/workers", trust_env=False).json()
        return {worker["name"]: worker for worker in answer["workers"]}

    def all_up(self) -> bool:
        return all(w["up"] and w["events"]["trust"] == "exact" for w in self.workers().values())


@pytest.fixture
def start(fleet: Fleet, engines: list[Engine], tmp_path: Path) -> Iterator[Start]:
    running: list[Client] = []

    def run(**config: Any) -> Client:
        gateway = LocalGateway(engines, fleet.folder, tmp_path, config=config)
        running.append(Client(gateway))
        gateway.wait_ready()
        if "keys_file" not in config:
            wait_until(running[-1].all_up, 30, "both workers exact")
        return running[-1]

    yield run
    for client in running:
        client.http.close()
        client.gateway.stop()


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def cached(answer: httpx.Response) -> int:
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def hits(engines: list[Engine]) -> float:
    """Prompt tokens found cached so far, by the engines' own count."""
    total = 0.0
    for engine in engines:
        for line in httpx.get(engine.url + "/metrics", trust_env=False).text.splitlines():
            if line.startswith("vllm:prefix_cache_hits_total"):
                total += float(line.rsplit(" ", 1)[1])
    return total


def running(engine: Engine) -> float:
    text = httpx.get(engine.url + "/metrics", trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_turns_go_where_their_prefix_is(start: Start, fresh: Callable[[int], str]) -> None:
    client = start(policy={"name": "prefix"})
    talks = [[user(fresh(120))] for _ in range(3)]
    homes = []
    for turn in range(3):
        for number, talk in enumerate(talks):
            answer = client.chat(talk)
            worker, matched = (answer.headers[f"x-hotprefix-{n}"] for n in ("worker", "matched-tokens"))
            assert abs(int(matched) - cached(answer)) <= BLOCK
            if turn == 0:
                homes.append(worker)
            else:
                assert worker == homes[number]
                assert cached(answer) >= 96
            talk.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
            talk.append(user("And then?"))
    text = client.http.get("/metrics").text
    assert 'hotprefix_predictions_total{cause="match"' in text
    judged = [line for line in text.splitlines() if line.startswith("hotprefix_predictions_total")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in judged if '"match"' in line) == 9, judged


def test_the_official_client_streams_through_it(start: Start, fresh: Callable[[int], str]) -> None:
    client = start()
    ours = openai.OpenAI(base_url=client.gateway.url + "/v1", api_key="none", max_retries=0)
    text = fresh(20)
    with ours.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        stream=True,
        max_tokens=6,
        temperature=0,
    ) as stream:
        chunks = list(stream)
    assert all(chunk.choices for chunk in chunks), "the usage chunk is ours, not the client's"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    whole = ours.completions.create(model="smollm2", prompt=[text, text], max_tokens=2)
    assert said
    assert len(whole.choices) == 2
    ours.close()


def test_two_tenants_never_hit_each_others_cache(
    start: Start, engines: list[Engine], fresh: Callable[[int], str], tmp_path: Path
) -> None:
    made = {tenant: new_key(tenant) for tenant in ("acme", "globex")}
    keys, secret = tmp_path / "keys.yaml", tmp_path / "secret"
    keys.write_text(json.dumps({"keys": [{"tenant": t, "sha256": e.sha256} for t, (_, e) in made.items()]}))
    secret.write_bytes(b"k" * 32)
    secret.chmod(0o600)
    client = start(keys_file=str(keys), secret_file=str(secret))
    talk = [user(fresh(120))]
    before = hits(engines)
    client.chat(talk, made["acme"][0])
    client.chat(talk, made["acme"][0])
    own = hits(engines)
    assert own - before >= 96, "a tenant hits its own cache"
    answer = client.chat(talk, made["globex"][0])
    assert hits(engines) == own, "and never another's"
    assert not [name for name in answer.headers if name.startswith("x-hotprefix")]
    assert answer.json()["usage"]["prompt_tokens_details"] is None
    assert client.http.post(CHAT, json={"model": "smollm2", "messages": talk}).status_code == 401


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_engines_work(
    start: Start, engines: list[Engine], fresh: Callable[[int], str], stream: bool
) -> None:
    client = start()
    body = {
        "model": "smollm2",
        "messages": [user(fresh(20))],
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": stream,
    }
    with httpx.Client(base_url=client.gateway.url, trust_env=False) as leaving:
        if stream:
            with leaving.stream("POST", CHAT, json=body, timeout=60) as answer:
                next(answer.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(CHAT, json=body, timeout=2.0)
    wait_until(lambda: not any(running(engine) for engine in engines), 20, "the engines are idle")
    wait_until(lambda: not any(w["running"] for w in client.workers().values()), 5)


def test_an_engine_that_dies_and_comes_back(
    start: Start, engines: list[Engine], fleet: Fleet, fresh: Callable[[int], str]
) -> None:
    client = start(policy={"name": "prefix"})
    talk = [user(fresh(120))]
    name = client.chat(talk).headers["x-hotprefix-worker"]
    other = next(engine.name for engine in engines if engine.name != name)
    victim = next(engine for engine in engines if engine.name == name)
    assert cached(client.chat(talk)) >= 96

    # In the middle of a stream: an error event, then the end.
    body = {
        "model": "smollm2",
        "messages": talk,
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    with client.http.stream("POST", CHAT, json=body) as answer:
        assert answer.headers["x-hotprefix-worker"] == name
        lines = answer.iter_lines()
        next(lines)
        victim.kill()
        data = [line[6:] for line in lines if line.startswith("data: ")]
    assert json.loads(data[-1])["error"]["type"] == "server_error"
    assert "[DONE]" not in data

    # Before the first byte: the other one serves, and nothing is believed of the dead one.
    answer = client.chat(talk)
    assert answer.headers["x-hotprefix-worker"] == other
    assert answer.headers["x-hotprefix-matched-tokens"] == "0"

    # Restarted on the same port: what it held before is forgotten.
    victim.restart()
    fleet.wait_healthy(600.0)
    wait_until(client.all_up, 60, "both workers exact again")
    assert client.workers()[name]["events"]["blocks"] == 0
    assert client.chat(talk).headers["x-hotprefix-worker"] == other
