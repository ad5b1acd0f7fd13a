"""Turns a GGUF file into an ordinary model folder. Run by the engine's Python: SOURCE_FOLDER FILE TARGET."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(source: str, name: str, target: str) -> None:
    """Dequantized to bfloat16; left packed, the weights would be slow and could not be saved."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
