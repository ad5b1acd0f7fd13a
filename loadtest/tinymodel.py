"""Writes a model folder without weights: a real tokenizer and chat template, a few kilobytes.

``transformers.AutoTokenizer.from_pretrained`` loads it as it loads any model's. The byte-level BPE
is made from a word list by rule, not trained, so each machine writes the same bytes.
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

MAX_LENGTH = 8192

WORDS = """
    the of and to in is it you that he was for on are with as his they be at one have this from or
    had by but what all were when we there can an your which their if do will each about how up out
    them then she many some so these would other into has more her two like him see time could no
    make than first been its who now people my made over did down only way find use may water long
    little very after words called just where most know get through back much before go good new
    write our used me man too any day same right look think also around another came come work three
    word must because does part even place well such here take why things help put years different
    away again off went old number great tell men say small every found still between name should
    home big give air line set own under read last never us left end along while might next sound
    below saw something thought both few those always looked show large often together asked house
    world going want school important until form food keep children feet land side without boy once
    animals life enough took four head above kind began almost live page got earth need far hand
    high year mother light country father let night picture being study second soon story since
    white ever paper hard near sentence better best across during today however sure knew try told
    young sun thing whole hear example heard several change answer room sea against top turned learn
    point city play toward five himself usually money seen car morning river stone song time learns
    falls open birds turn south carry bread count boats rain comes late system user assistant tool
    function name arguments description
""".split()  # noqa: SIM905 (words read better than a list of them)
"""Text made of these has about five characters a token, as English has under a real tokenizer."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content %}{{- message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + call.function.name + ' ' }}
        {{- call.function.arguments | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def write_tiny_model(folder: Path) -> Path:
    """Write the folder (made when absent) and return it. Writing again changes nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_LENGTH,
        },
    )
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": MAX_LENGTH,
            "vocab_size": len(_vocabulary()[0]),
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    )
    return folder


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: a common word with the space before it is one token; all else is pieces
    and bytes. Any text survives encode and decode."""
    vocabulary, merges = _vocabulary()
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    space = "\u0120"  # how byte-level BPE writes a space
    names = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: dict[tuple[str, str], None] = {}
    for word in dict.fromkeys(WORDS):
        # Each merge begins with the space, so none takes letters that another word needs: a listed
        # word after a space is always one token.
        text = space + word
        for length in range(2, len(text) + 1):
            merges[text[: length - 1], text[length - 1]] = None
    names += dict.fromkeys(left + right for left, right in merges)
    return {name: i for i, name in enumerate(names)}, list(merges)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    """``python -m loadtest.tinymodel DIR``"""
    parser = argparse.ArgumentParser(prog="python -m loadtest.tinymodel", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    print(write_tiny_model(parser.parse_args().folder))


if __name__ == "__main__":
    main()
