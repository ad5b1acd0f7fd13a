"""Prediction against truth, end to end: what the engine reports decides how far its events are believed."""

from typing import Any

from loadtest.harness import eventually

LONG = "The river bends twice before the mill, and the old road follows it as far as the bridge. " * 12


async def test_mispredictions_demote_a_source_and_good_ones_promote_it_again(start: Any) -> None:
    async with start(1, engine={"dev_mode": True}) as stack:
        engine, hub = stack.engines[0], stack.gateway.hub
        for number in range(5):
            await stack.chat(f"{number} {LONG}")
        await stack.settled()
        assert hub.status("w0").trust == "exact"

        # The engine empties its cache and nobody hears of it: every prediction is now too high.
        engine.app.cache.reset()
        engine.app.cache.take_events()
        for number in range(3):
            answer = await stack.chat(f"{number} {LONG}")
            assert int(answer.headers["x-hotprefix-matched-tokens"]) > 500
        assert await stack.metric("hotprefix_predictions_total", worker="w0", cause="over") == 3
        await eventually(lambda: hub.status("w0").trust == "suspect", what="demoted")
        workers = (await stack.client.get(stack.admin_url + "/v1/workers")).json()["workers"]
        assert "predictions were wrong" in workers[0]["events"]["reason"]
        assert (
            'hotprefix_source_trust{trust="suspect",worker="w0"} 1.0'
            in (await stack.client.get("/metrics")).text
        )

        for _ in range(8):
            await stack.chat(f"0 {LONG}")
            await stack.settled()
        await eventually(lambda: hub.status("w0").trust == "exact", what="promoted")


async def test_an_eviction_after_the_choice_is_no_misprediction(start: Any) -> None:
    async with start(1, engine={"num_blocks": 200, "dev_mode": True}) as stack:
        await stack.chat(LONG)
        await stack.settled()
        engine = stack.engines[0]
        engine.set_faults(slow=0.2)
        router, index = stack.gateway.router, stack.gateway.index
        before = index.mark()
        plans = []
        plan = router.plan

        def remember(*arguments: Any) -> Any:
            plans.append(plan(*arguments))
            return plans[-1]

        router.plan = remember
        await stack.chat(LONG)
        predicted = plans[-1].prediction.cached
        assert predicted > 500
        # The same plan, had the engine dropped the blocks while the request was on its way:
        await stack.client.post(engine.url + "/reset_prefix_cache")
        await eventually(lambda: index.mark() > before, what="the events of the reset")
        await eventually(lambda: not index.match(plans[-1].keys[0]))
        assert router.finished(plans[-1], 0) == "evicted"
        assert hub_outcomes(stack) == "exact"


def hub_outcomes(stack: Any) -> str:
    return str(stack.gateway.hub.status("w0").trust)


async def test_requests_whose_cache_is_not_read_are_classed_apart(start: Any) -> None:
    async with start(1) as stack:
        for _ in range(2):
            await stack.client.post(
                "/v1/completions",
                json={"model": "sim", "prompt": LONG, "max_tokens": 2, "prompt_logprobs": 1},
            )
            await stack.settled()
        assert await stack.metric("hotprefix_predictions_total", cause="unread") == 2
        await stack.client.post(
            "/v1/completions", json={"model": "sim", "prompt": ["a", "b"], "max_tokens": 2}
        )
        assert await stack.metric("hotprefix_predictions_total", cause="several") == 1


async def test_an_engine_that_reports_nothing_is_unreported(start: Any) -> None:
    async with start(1, engine={"prompt_tokens_details": False}) as stack:
        await stack.chat(LONG)
        assert await stack.metric("hotprefix_predictions_total", cause="unreported") == 1


async def test_workers_without_events_are_learned(start: Any) -> None:
    async with start(3, events=False) as stack:
        for topic in ("alpha", "beta", "gamma"):
            first = await stack.chat(topic + LONG)
            second = await stack.chat(topic + LONG + "and more")
            assert second.headers["x-hotprefix-worker"] == first.headers["x-hotprefix-worker"]
            assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
        assert await stack.metric("hotprefix_predictions_total") == 0


async def test_simultaneous_twins_go_to_one_worker(start: Any) -> None:
    import asyncio

    async with start(4, engine={"prefill_rate": 5000.0}) as stack:
        answers = await asyncio.gather(*(stack.chat(LONG) for _ in range(2)))
        assert len({answer.headers["x-hotprefix-worker"] for answer in answers}) == 1
