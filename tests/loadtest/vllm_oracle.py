"""Runs in the engine's environment: the simulated cache against vLLM's own KV cache manager.

Random requests are put to both, step by step; after each step the events must agree block by block,
up to the names (hashes) the two give to blocks. Prints how many block events were compared.
"""

import random
import sys
from typing import Any

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from loadtest.sim.cache import BlockCache, Removed, Space, Stored, TooLarge

STEPS = 200


class Pair:
    """One cache of each kind under the same requests."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.size = self.random.choice([2, 4, 16])
        blocks = self.random.randint(6, 40)
        self.ours = BlockCache(blocks, self.size)
        spec = FullAttentionSpec(block_size=self.size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.theirs = KVCacheManager(
            config,
            max_model_len=8192,
            scheduler_block_size=self.size,
            hash_block_size=self.size,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        self.hasher = get_request_block_hasher(self.size, sha256)
        self.names: dict[bytes, Any] = {}
        self.running: list[list[Any]] = []
        self.compared = 0

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.4 or not self.running:
            self.admit()
        elif choice < 0.8:
            self.decode(self.random.choice(self.running))
        else:
            held, request, _ = self.running.pop(self.random.randrange(len(self.running)))
            self.theirs.free(request)
            self.ours.free(held)
            self.ours.check_integrity()
        self.compare()

    def admit(self) -> None:
        prompt = [self.random.randint(0, 1) for _ in range(self.random.randint(1, self.size * 4))]
        output = self.random.randint(1, self.size * 2)
        salt = self.random.choice([None, None, "salt"])
        try:
            held = self.ours.open(prompt, Space("", salt or ""), output)
        except TooLarge:
            return
        if held is None:
            return
        request = Request(
            request_id=str(self.random.random()),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=output),
            pooling_params=None,
            block_hasher=self.hasher,
            cache_salt=salt,
        )
        blocks, cached, _ = self.theirs.get_computed_blocks(request)
        assert cached == held.cached_tokens, (self.seed, cached, held.cached_tokens)
        assert self.theirs.allocate_slots(request, len(prompt) - cached, cached, blocks) is not None
        request.num_computed_tokens = len(prompt)
        self.ours.computed_prompt(held)
        self.running.append([held, request, output])

    def decode(self, one: list[Any]) -> None:
        held, request, left = one
        if not left:
            return
        token = self.random.randint(0, 1)
        if request.num_output_tokens:
            assert self.theirs.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        request.append_output_token_ids(token)
        self.ours.append(held, token)
        one[2] -= 1

    def compare(self) -> None:
        theirs = [row for event in self.theirs.take_events() for row in self.their_rows(event)]
        ours = [row for event in self.ours.take_events() for row in self.our_rows(event)]
        assert len(theirs) == len(ours), (self.seed, theirs, ours)
        for (their_hash, their_parent, *their_rest), (our_hash, our_parent, *our_rest) in zip(
            theirs, ours, strict=True
        ):
            assert their_rest == our_rest, (self.seed, their_rest, our_rest)
            assert self.names.setdefault(our_hash, their_hash) == their_hash, self.seed
            assert (None if our_parent is None else self.names[our_parent]) == their_parent, self.seed
        self.compared += len(ours)

    def their_rows(self, event: object) -> list[tuple[Any, ...]]:
        if isinstance(event, BlockRemoved):
            return [(digest, None, "removed") for digest in event.block_hashes]
        assert isinstance(event, BlockStored)
        parents = [event.parent_block_hash, *event.block_hashes]
        keys = event.extra_keys or [None] * len(event.block_hashes)
        return self.rows(event.block_hashes, parents, event.token_ids, keys)

    def our_rows(self, event: object) -> list[tuple[Any, ...]]:
        if isinstance(event, Removed):
            return [(event.hash, None, "removed")]
        assert isinstance(event, Stored)
        salted = event.first == 0 and event.space.salt
        keys = [(event.space.salt,) if salted and i == 0 else None for i in range(len(event.hashes))]
        return self.rows(event.hashes, [event.parent, *event.hashes], event.tokens, keys)

    def rows(self, hashes: Any, parents: Any, tokens: Any, keys: Any) -> list[tuple[Any, ...]]:
        size = self.size
        return [
            (digest, parents[i], list(tokens[i * size : (i + 1) * size]), keys[i])
            for i, digest in enumerate(hashes)
        ]


def main() -> None:
    init_none_hash(sha256)
    compared = 0
    for seed in range(int(sys.argv[1])):
        pair = Pair(seed)
        for _ in range(STEPS):
            pair.step()
        compared += pair.compared
    print(compared)


if __name__ == "__main__":
    main()
