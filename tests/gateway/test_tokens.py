"""Exact where it can be, by text where it cannot, and the reason said. No engine: a small tokenizer."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from cacheindex.keys import prompt_keys, text_tokens
from gateway import config
from gateway.openai import ChatRequest, CompletionRequest
from gateway.tokenizer import Rendering
from gateway.tokens import TEXT_BYTES, Tokenizers
from loadtest.tinymodel import build_tokenizer, write_tiny_model
from tests.gateway.asks import ROOM, chat, one, user


@pytest.fixture
async def tokenizers(tiny_model: Path) -> AsyncIterator[Tokenizers]:
    made = Tokenizers(config.Tokens(deadline_s=20.0))
    await made.load("m", str(tiny_model))
    assert made.known("m"), made.why_not("m")
    yield made
    made.close()


def ids(text: str) -> list[int]:
    encoded: list[int] = build_tokenizer().encode(text, add_special_tokens=False).ids
    return encoded


# --- exact ---------------------------------------------------------------------------------------


async def test_a_chat_is_rendered_and_encoded(tokenizers: Tokenizers) -> None:
    prompt = await one(tokenizers, chat(user()))
    assert (prompt.kind, prompt.reason) == ("tokens", "")
    assert list(prompt.tokens) == ids("<|im_start|>user\nthe water<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.count == len(prompt.tokens)


async def test_completions_give_one_prompt_for_each_entry(tokenizers: Tokenizers) -> None:
    async def prompts(prompt: Any, **fields: Any) -> list[list[int]]:
        request = CompletionRequest(prompt=prompt, **fields)
        found = await tokenizers.prompts("completions", "m", request, ROOM)
        assert all(p.kind == "tokens" and not p.reason for p in found)
        return [list(p.tokens) for p in found]

    assert await prompts("the water") == [ids("the water")]
    assert await prompts(["the", "water"]) == [ids("the"), ids("water")]
    assert await prompts([1, 2]) == [[1, 2]]
    assert await prompts([[1, 2], [3]]) == [[1, 2], [3]]
    assert await prompts(["the", [7]]) == [ids("the"), [7]]
    assert await prompts([1, 2, 3], truncate_prompt_tokens=2) == [[2, 3]]
    assert await prompts([1, 2, 3], truncate_prompt_tokens=2, truncation_side="right") == [[1, 2]]
    assert await prompts([1, 2, 3], truncate_prompt_tokens=0) == [[]]
    assert await prompts([]) == []


async def test_templates_and_tokenizers_may_both_add_a_beginning(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "bos")
    tokenizer = build_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    made = Tokenizers(config.Tokens())
    await made.load("m", str(folder))

    async def tokens(request: ChatRequest | CompletionRequest) -> list[int]:
        return list((await one(made, request)).tokens)

    words = ids("the water and the stone")
    said = "the water and the stone"
    first, last = ids("<|im_start|>")[0], ids("<|im_end|>")[0]
    assert await tokens(chat(user(said))) == [first, *words]
    assert await tokens(chat(user(said), add_special_tokens=True)) == [first, first, *words, last]
    assert await tokens(CompletionRequest(prompt=said)) == [first, *words, last]
    assert await tokens(CompletionRequest(prompt=said, add_special_tokens=False)) == words
    assert await tokens(CompletionRequest(prompt=said, truncate_prompt_tokens=4)) == [
        first,
        *words[-2:],
        last,
    ]
    cut = CompletionRequest(prompt=said, truncate_prompt_tokens=4, truncation_side="left")
    assert await tokens(cut) == [*words[-3:], last]
    made.close()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": -1}, 31),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0}, 32),
        ({"truncate_prompt_tokens": 5}, 5),
    ],
)
async def test_minus_one_keeps_what_the_model_holds(tokenizers: Tokenizers, fields: Any, kept: int) -> None:
    prompt = await one(tokenizers, CompletionRequest(prompt="the water " * 100, **fields), 32)
    assert prompt.count == kept
    assert list(prompt.tokens) == ids("the water " * 100)[-kept:]


async def test_keys_run_over_the_tokens(tokenizers: Tokenizers) -> None:
    prompt = await one(tokenizers, CompletionRequest(prompt="the water " * 40))
    assert prompt_keys(b"root", prompt.tokens) == prompt_keys(b"root", list(prompt.tokens)) != []


# --- not exact, and said -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (chat(user(), chat_template="{{ messages }}"), "own_template"),
        (chat(user(), chat_template_kwargs={"chat_template": "{{ 7 * 7 }}"}), "chat_template_kwargs"),
        (chat(user(), chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
        (chat(user(), chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
        (chat(user([{"type": "image_url", "image_url": {"url": "data:,x"}}])), "media"),
        (chat(user([{"type": "file", "file": {"file_id": "f"}}])), "media"),
        (chat(user([{"image_url": "http://127.0.0.1/"}])), "media"),
        (chat(user([{"type": "text", "text": "x", "input_audio": {}}])), "media"),
        (chat(user([{"type": "hologram"}])), "messages"),
        (chat({"content": "no role"}), "messages"),
        (chat(user(7)), "messages"),
        (chat(), "messages"),
        (chat(user(), tools=[{"type": "web_search"}]), "tools"),
        (chat(user(), {"role": "assistant", "tool_calls": [{"type": "custom"}]}), "tool_calls"),
        (chat(user(), continue_final_message=True), "continue_final_message"),
        (chat(user(), truncate_prompt_tokens=-7), "truncation"),
        (chat(user(), truncation_side="middle"), "truncation"),
        (chat(user("half a pair \ud800")), "failed"),
        (CompletionRequest(prompt="half a pair \ud800"), "failed"),
        (CompletionRequest(prompt="the water", suffix="stone"), "suffix"),
        (CompletionRequest(prompt="x" * (ROOM * 32)), "too_long"),
    ],
)
async def test_what_is_not_exact_is_routed_by_its_text(
    tokenizers: Tokenizers, request_: ChatRequest | CompletionRequest, reason: str
) -> None:
    prompt = await one(tokenizers, request_)
    assert (prompt.kind, prompt.reason) == ("text", reason)
    assert tokenizers.counts[reason] == 1


@pytest.mark.parametrize("prompt", [[-1], [2**32], [[1], [2**40]], [[1, "x"]]])
async def test_ids_that_are_no_ids_are_left_to_the_engine(tokenizers: Tokenizers, prompt: Any) -> None:
    found = await tokenizers.prompts("completions", "m", CompletionRequest(prompt=prompt), ROOM)
    assert (found[-1].kind, found[-1].reason, len(found[-1].tokens)) == ("none", "token_ids", 0)


async def test_embeddings_have_no_prompt(tokenizers: Tokenizers) -> None:
    both = CompletionRequest(prompt="the", prompt_embeds=["AAAA", "BBBB"])
    found = await tokenizers.prompts("completions", "m", both, ROOM)
    assert [p.kind for p in found] == ["none", "none", "tokens"]
    assert (await one(tokenizers, CompletionRequest(prompt_embeds="AAAA"))).reason == "prompt_embeds"


async def test_a_model_nobody_knows_is_routed_by_text(tmp_path: Path) -> None:
    made = Tokenizers(config.Tokens(tokenizers={"listed": str(tmp_path / "nothing")}))
    assert made.why_not("m") == "never loaded"
    await made.load("m", None)
    await made.load("broken", str(tmp_path))
    await made.load("listed", str(write_tiny_model(tmp_path / "tiny")))
    assert not any(made.known(name) for name in ("m", "broken", "listed"))
    assert made.why_not("m") == "nobody said where its tokenizer is"
    assert made.why_not("broken").startswith(f"loading {tmp_path}: failed")
    assert (await one(made, chat(user()))).reason == "no_tokenizer"
    ids_only = await made.prompts("completions", "m", CompletionRequest(prompt=["a", [1, 2]]), None)
    assert [(p.kind, list(p.tokens)) for p in ids_only[1:]] == [("tokens", [1, 2])]
    made.close()


async def test_a_folder_with_a_bad_template_still_completes(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "bad")
    (folder / "chat_template.jinja").write_text("{% for %}")
    made = Tokenizers(config.Tokens())
    await made.load("m", str(folder))
    assert (await one(made, chat(user()))).reason == "bad_template"
    assert (await one(made, CompletionRequest(prompt="the"))).kind == "tokens"
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    await made.load("m", str(folder))
    assert (await one(made, chat(user()))).reason == "renderer"
    made.close()


async def test_text_grows_at_its_end_as_a_conversation_does() -> None:
    made = Tokenizers(config.Tokens())
    media = [
        {"type": "image_url", "image_url": {"url": "data:," + "A" * 50_000}},
        {"type": "text", "text": "what?"},
    ]
    turns = [user("a " * 200), user(media), {"role": "assistant", "content": "b " * 200}, user("more " * 50)]
    short, long = await one(made, chat(*turns[:3])), await one(made, chat(*turns))
    other = await one(made, chat(turns[0], user([{"type": "image_url", "image_url": {"url": "data:,B"}}])))
    keys = [prompt_keys(b"root", prompt.tokens) for prompt in (short, long, other)]
    assert keys[1][: len(keys[0])] == keys[0]
    assert keys[2] != keys[0][: len(keys[2])]
    assert len(short.tokens) < 2000  # media are named, not spelled
    tools = await one(made, chat(*turns, tools=[{"type": "function", "function": {"name": "f"}}]))
    assert prompt_keys(b"root", tools.tokens)[0] != keys[1][0]
    made.close()


async def test_only_so_much_text_gets_keys() -> None:
    made = Tokenizers(config.Tokens())
    prompt = await one(made, chat(user("灯" * 3_000_000)))
    assert len(prompt.tokens) == TEXT_BYTES // 4
    assert prompt.count == pytest.approx(750_000, rel=0.01)
    plain = await one(made, CompletionRequest(prompt="abcd" * 10))
    assert plain.tokens == text_tokens("abcd" * 10)
    made.close()


async def test_engines_may_have_been_told_to_render_otherwise(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{{ mood }}{{ tools | length if tools else 'none' }}{{ messages[0].content }}")
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = chat(user("!"), tools=tools, tool_choice="none")
    made = Tokenizers(config.Tokens())
    how = Rendering(chat_template=str(file), template_kwargs={"mood": "calm"}, exclude_tools_when_none=True)
    await made.load("m", str(tiny_model), how)
    assert list((await one(made, asked)).tokens) == ids("calmnone!")
    loud = chat(user("!"), tools=tools, chat_template_kwargs={"mood": "loud"})
    assert list((await one(made, loud)).tokens) == ids("loud1!")
    await made.load("m", str(tiny_model), Rendering(chat_template="{{ messages[0].content }}?"))
    assert list((await one(made, asked)).tokens) == ids("!?")
    await made.load("m", str(tiny_model), Rendering(chat_template=str(tmp_path / "missing.jinja")))
    assert made.why_not("m") == ""  # the tokenizer that was there serves on
    made.close()
