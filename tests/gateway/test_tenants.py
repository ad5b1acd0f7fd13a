"""API keys, and two tenants who share nothing: no cache hit, no hint, no header."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.tenants import BadKeysFile, new_key

LONG = "The river bends twice before the mill, and the old road follows it as far as the bridge. " * 12


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    lines = ["keys:"]
    made = {}
    for tenant, admin in (("acme", False), ("globex", False), ("ops", True)):
        key, entry = new_key(tenant, admin=admin)
        made[tenant] = key
        lines.append(f"- {{tenant: {tenant}, sha256: {entry.sha256}, admin: {str(admin).lower()}}}")
    path = tmp_path / "keys.yaml"
    path.write_text("\n".join(lines))
    secret = tmp_path / "secret"
    secret.write_bytes(b"z" * 32)
    secret.chmod(0o600)
    return {"file": str(path), "secret": str(secret), **made}


def settings(keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"keys_file": keys["file"], "secret_file": keys["secret"], **more}


async def ask(stack: Any, key: str, content: str, **fields: Any) -> httpx.Response:
    body = {"model": "sim", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    headers = {"authorization": f"Bearer {key}"}
    answer = await stack.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def test_every_route_wants_a_key_but_the_written_list(start: Any, keys: dict[str, Any]) -> None:
    async with start(1, **settings(keys)) as stack:
        for base, paths in (
            (
                stack.url,
                ["/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/health", "/ready"],
            ),
            (stack.admin_url, ["/metrics", "/v1/workers", "/v1/index", "/health"]),
        ):
            for path in [*paths, "/nothing", "//health", "/health/", "/%68ealth/x", "/HEALTH"]:
                for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
                    for key in (None, "wrong"):
                        headers = {"authorization": f"Bearer {key}"} if key else {}
                        answer = await stack.client.request(method, base + path, headers=headers)
                        if path in ("/health", "/ready") and method in ("GET", "HEAD"):
                            assert answer.status_code in (200, 405), (method, path)
                        elif path in ("/health", "/ready"):
                            assert answer.status_code in (404, 405)
                        else:
                            assert answer.status_code == 401, (method, base, path, answer.status_code)
                            assert method == "HEAD" or answer.json()["error"]["code"] == "invalid_api_key"


async def test_metrics_and_admin_want_an_admins_key(start: Any, keys: dict[str, Any]) -> None:
    async with start(1, **settings(keys)) as stack:
        for url in (stack.url + "/metrics", stack.admin_url + "/v1/workers", stack.admin_url + "/metrics"):
            for tenant, status in (("acme", 403), ("ops", 200)):
                answer = await stack.client.get(url, headers={"authorization": f"Bearer {keys[tenant]}"})
                assert answer.status_code == status, (url, tenant)
                assert status == 200 or answer.json()["error"]["code"] == "not_admin"


async def test_two_tenants_with_one_prompt_never_hit_each_others_cache(
    start: Any, keys: dict[str, Any]
) -> None:
    async with start(2, **settings(keys)) as stack:
        for _ in range(2):
            await ask(stack, keys["acme"], LONG)
            await stack.settled()
        hits = await stack.metric("hotprefix_cached_tokens_total")
        assert hits > 500, "a tenant does hit its own cache"
        answer = await ask(stack, keys["globex"], LONG)
        assert await stack.metric("hotprefix_cached_tokens_total") == hits
        assert await stack.metric("hotprefix_predictions_total", cause="match") == 3
        assert "x-hotprefix-matched-tokens" not in answer.headers
        assert "x-hotprefix-worker" not in answer.headers
        assert answer.json()["usage"]["prompt_tokens_details"] is None
        again = await ask(stack, keys["acme"], LONG)
        assert again.json()["usage"]["prompt_tokens_details"] is None, "not even of its own"


async def test_a_client_cannot_name_another_tenants_salt(start: Any, keys: dict[str, Any]) -> None:
    async with start(1, **settings(keys)) as stack:
        await ask(stack, keys["acme"], LONG)
        salt = json.loads(stack.requests()[-1].body)["cache_salt"]
        await ask(stack, keys["globex"], LONG, cache_salt=salt)
        sent = json.loads(stack.requests()[-1].body)["cache_salt"]
        assert sent != salt
        assert await stack.metric("hotprefix_cached_tokens_total") == 0


async def test_hits_are_shown_to_tenants_when_the_operator_says_so(start: Any, keys: dict[str, Any]) -> None:
    async with start(1, **settings(keys, hit_headers="always")) as stack:
        await ask(stack, keys["acme"], LONG)
        await stack.settled()
        answer = await ask(stack, keys["acme"], LONG)
        assert int(answer.headers["x-hotprefix-matched-tokens"]) > 500
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500


async def test_streams_hide_hits_too(start: Any, keys: dict[str, Any]) -> None:
    async with start(1, **settings(keys)) as stack:
        answer = await ask(stack, keys["acme"], LONG, stream=True, stream_options={"include_usage": True})
        assert '"usage"' in answer.text
        assert '"cached_tokens"' not in answer.text


async def test_an_admin_may_steer_the_kv_connector(start: Any, keys: dict[str, Any]) -> None:
    async with start(1, **settings(keys)) as stack:
        await ask(stack, keys["ops"], "x", kv_transfer_params={"a": 1})
        assert b"kv_transfer_params" in stack.requests()[-1].body
        await ask(stack, keys["acme"], "x", kv_transfer_params={"a": 1})
        assert b"kv_transfer_params" not in stack.requests()[-1].body


async def test_no_key_prompt_or_salt_reaches_logs_or_metrics(
    start: Any, keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with start(2, **settings(keys)) as stack:
        stack.engines[0].set_faults(fail_next=2)
        for _ in range(4):
            await ask(stack, keys["acme"], "CANARY-PROMPT " + LONG, cache_salt="CANARY-SALT")
        salt = json.loads(stack.requests()[-1].body)["cache_salt"]
        await stack.client.post("/v1/completions", json={}, headers={"authorization": "Bearer CANARY-KEY"})
        admin = {"authorization": f"Bearer {keys['ops']}"}
        shown = [
            (await stack.client.get(stack.admin_url + path, headers=admin)).text
            for path in ("/metrics", "/v1/workers", "/v1/index")
        ]
        everything = "\n".join([*shown, caplog.text])
        for secret in ("CANARY", keys["acme"], salt, "z" * 32):
            assert secret not in everything


async def test_a_keys_file_that_cannot_be_read_keeps_the_gateway_from_starting(
    start: Any, tmp_path: Path
) -> None:
    with pytest.raises(BadKeysFile, match="No such file"):
        async with start(1, keys_file=str(tmp_path / "none")):
            pass
