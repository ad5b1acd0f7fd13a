"""Starting real engines: together, anew on the same address, and gone without a trace."""

from collections.abc import Callable

import httpx

from hotprefix.engines import Engine


def complete(engine: Engine, prompt: str) -> tuple[int, int]:
    """Prompt tokens and, of those, cached tokens of one short completion."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60.0)
    answer.raise_for_status()
    usage = answer.json()["usage"]
    details = usage["prompt_tokens_details"]
    return usage["prompt_tokens"], details["cached_tokens"] if details else 0


def test_each_engine_has_a_cache_of_its_own(engines: list[Engine], fresh: Callable[[int], str]) -> None:
    prompt = fresh(300)
    tokens, cached = complete(engines[0], prompt)
    assert cached == 0
    assert complete(engines[0], prompt) == (tokens, (tokens - 1) // 32 * 32)
    assert complete(engines[1], prompt) == (tokens, 0)


def test_a_killed_engine_comes_back_on_the_same_address_with_an_empty_cache(
    engines: list[Engine], fresh: Callable[[int], str]
) -> None:
    engine, prompt = engines[1], fresh(300)
    complete(engine, prompt)
    url, life = engine.url, engine.pid
    engine.kill()
    assert engine.exit_code == 128 + 9
    assert not engine.healthy()
    engine.restart()
    engine.wait_healthy()
    assert engine.url == url
    assert engine.pid != life
    assert complete(engine, prompt)[1] == 0
