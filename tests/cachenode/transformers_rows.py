"""Run by the engine's Python: answers questions about the transformers connector, one JSON line each.

A question is ``{"do": name, …}``, the answer what that function below returns, or ``{"error": …}``. Ends when
standard input does.
"""

import copy
import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from cachenode.connectors.naming import Asked
from cachenode.connectors.transformers import Prefixes, connect, layout_of
from cachenode.wire import Mode
from tests.cachenode.transformers_checks import CHECKS

SECRET = b"a secret of the tests"


class Rows:
    """One model, and the prefixes of it that a node keeps."""

    def __init__(self) -> None:
        self.model: PreTrainedModel | None = None
        self.kept: Prefixes | None = None
        self.answers: dict[str, Callable[..., dict[str, Any]]] = {
            "names": lambda: {"names": list(CHECKS)},
            "check": self.check,
            "load": self.load,
            "keep": self.keep,
            "equal": self.equal,
            "save": self.save,
            "held": self.held,
            "leave": self.leave,
            "follow": self.follow,
            "generate": self.generate,
        }

    def check(self, name: str) -> dict[str, Any]:
        CHECKS[name]()
        return {"holds": True}

    def load(self, folder: str, dtype: str) -> dict[str, Any]:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        return {"layout": layout_of(self.model, "smollm2").fingerprint()}

    def keep(
        self,
        socket: str,
        model: str = "smollm2",
        mode: Mode = "map",
        layout: dict[str, Any] | None = None,
        **asked: str,
    ) -> dict[str, Any]:
        """From now on prefixes are kept by the node at ``socket``."""
        if self.kept is not None:
            self.kept.close()
        of = layout_of(self.model, model, **(layout or {}))
        self.kept = connect(socket, of, "rows", Asked(**asked), secret=SECRET, mode=mode)
        return {"layout": of.fingerprint()}

    def equal(self, tokens: list[int], rest: list[int]) -> dict[str, Any]:
        """Saves the cache of ``tokens``, restores it, and goes on with ``rest`` from the original (cut to what was
        restored) and from the restored one: are all logits equal, bit for bit?"""
        cache = self._prefill(tokens)
        saved = self.kept.save(cache, tokens)
        restored, count = self.kept.restore([*tokens, rest[0]])
        cut = copy.deepcopy(cache)
        if count < len(tokens):
            cut.crop(count - len(tokens))
        followed = [*tokens[count:], *rest]
        one, other = self._steps(cut, followed), self._steps(restored, followed)
        changed = self._steps(self._disturbed(tokens, rest[0]), followed)
        return {
            "saved": saved,
            "restored": count,
            "equal": [torch.equal(a, b) for a, b in zip(one, other, strict=True)],
            "finite": all(bool(torch.isfinite(step).all()) for step in one),
            "would_differ": not any(torch.equal(a, b) for a, b in zip(one, changed, strict=True)),
            "logits": digest(other),
        }

    def save(self, tokens: list[int]) -> dict[str, Any]:
        return {"saved": self.kept.save(self._prefill(tokens), tokens)}

    def held(self, tokens: list[int]) -> dict[str, Any]:
        return {"restored": self.kept.restore([*tokens, 0])[1]}

    def leave(self) -> dict[str, Any]:
        self.kept.close()
        self.kept = None
        return {}

    def follow(self, tokens: list[int], rest: list[int]) -> dict[str, Any]:
        """The logits after a restored prefix; nothing of it was computed here."""
        restored, count = self.kept.restore([*tokens, rest[0]])
        return {"restored": count, "logits": digest(self._steps(restored, [*tokens[count:], *rest]))}

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """What ``generate`` writes after ``tokens``, with its own cache and with a restored one."""
        restored, found = self.kept.restore(tokens)
        asked = {"max_new_tokens": count, "do_sample": False}
        ids = torch.tensor([tokens])
        mask = torch.ones_like(ids)
        own = self.model.generate(ids, attention_mask=mask, **asked)
        ours = self.model.generate(ids, attention_mask=mask, past_key_values=restored, **asked)
        return {"restored": found, "own": own[0].tolist(), "ours": ours[0].tolist()}

    @torch.inference_mode()
    def _prefill(self, tokens: Sequence[int]) -> DynamicCache:
        cache = DynamicCache()
        self.model(torch.tensor([tokens]), past_key_values=cache)
        return cache

    @torch.inference_mode()
    def _steps(self, cache: DynamicCache, tokens: Sequence[int]) -> list[torch.Tensor]:
        """The logits after each token, one step a token. Fills ``cache`` further."""
        steps = (self.model(torch.tensor([[token]]), past_key_values=cache) for token in tokens)
        return [step.logits[0, -1] for step in steps]

    def _disturbed(self, tokens: list[int], then: int) -> DynamicCache:
        """A restored cache with one number changed: what an equality that means something tells apart."""
        cache, _ = self.kept.restore([*tokens, then])
        cache.layers[0].values[0, 0, 0, 0] += 1
        return cache


def digest(steps: Sequence[torch.Tensor]) -> str:
    state = hashlib.sha256()
    for step in steps:
        state.update(step.contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def main() -> None:
    rows = Rows()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = rows.answers[asked.pop("do")](**asked)
        except (AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError):
            answer = {"error": traceback.format_exc()[-3000:]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
