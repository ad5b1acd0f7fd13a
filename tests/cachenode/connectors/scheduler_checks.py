"""Run by an engine's Python: the connector under vLLM's own scheduler, with a node in memory and workers whose
copies end many steps later. KV is simulated: a block's bytes are the hash of its whole prefix, so that every step
can check that what it reads is right. Prints one JSON object; ``test_scheduler_checks.py`` looks at it."""

import hashlib
import json
import random
import sys
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cachenode.connectors.adapters import Adapters
from cachenode.connectors.naming import Namer
from cachenode.connectors.vllm import HotprefixConnector, StepReport, StepWork
from cachenode.connectors.vllm_facts import Facts
from cachenode.connectors.vllm_scheduler import SchedulerSide
from cachenode.connectors.work import Load, Report, Store
from tests.cachenode.connectors.engine_objects import cache, full, transfer
from tests.cachenode.connectors.node_fake import FakeNode

BLOCK = 32
BLOCKS = 34
STEPS = 400
HOLD = 0.5


class MemoryNode(FakeNode):
    """Keeps a block's simulated bytes too, and what a lease is of."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[tuple[str, bytes, bytes], str] = {}
        self.lent: dict[int, list[tuple[str, bytes, bytes]]] = {}

    def lease(
        self, first: int, keys: bytes, proofs: bytes, adapter: str = "", *, skip: int = 0
    ) -> int | None:
        ticket = super().lease(first, keys, proofs, adapter, skip=skip)
        if ticket is not None:
            self.lent[max(self.leases, default=0)] = self._names(adapter, keys, proofs)[skip:]
        return ticket

    def wait_for(self, tickets: list[int], seconds: float) -> list[Any]:
        return []

    def forget(self) -> None:
        self.held.clear()

    def close(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CheckedConnector(HotprefixConnector):
    """The connector with a node and a clock of the test's."""

    def make_scheduler_side(self, facts: Facts) -> SchedulerSide:
        self.node, self.clock = MemoryNode(), Clock()
        namer = Namer(facts.layout.model, facts.layout.block_tokens, b"0123456789abcdef")
        return SchedulerSide(facts, self.node, namer, Adapters(), self.clock)  # type: ignore[arg-type]


def expected(tokens: list[int], block: int, salt: str | None) -> str:
    return hashlib.sha256(f"{salt}{tokens[: (block + 1) * BLOCK]}".encode()).hexdigest()


class Engine:
    """vLLM's scheduler, and ``ranks`` workers that are one list of late copies each."""

    def __init__(self, config: VllmConfig, seed: int) -> None:
        self.dice = random.Random(seed)
        cached = cache(full(BLOCK), blocks=BLOCKS)
        config.cache_config.num_gpu_blocks = BLOCKS
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cached,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        connector = self.scheduler.connector
        assert isinstance(connector, CheckedConnector)
        self.connector, self.node, self.clock = connector, connector.node, connector.clock
        self.kv: dict[int, str] = {}
        self.copies: list[Load | Store] = []
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.counts: dict[str, int] = dict.fromkeys(
            (
                "requests",
                "finished",
                "aborted",
                "preempted",
                "loads",
                "bad_loads",
                "stores",
                "wrong",
                "steps",
            ),
            0,
        )
        self.most_held = 0

    def add(self, tokens: list[int], answer: int, salt: str | None = None) -> str:
        self.counts["requests"] += 1
        request = Request(
            request_id=f"r{self.counts['requests']}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request.request_id

    def abort(self, request: str) -> None:
        self.counts["aborted"] += 1
        self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)

    def step(self, patience: float) -> None:
        """One step; each copy under way ends in it with some chance."""
        self.counts["steps"] += 1
        self.clock.now += patience
        output = self.scheduler.schedule()
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        meta = output.kv_connector_metadata
        assert isinstance(meta, StepWork)
        self.copies += [*meta.work.loads, *meta.work.stores]
        # Copies run beside the computation: here, before it.
        copied = self.copy()
        result = ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={name: i for i, name in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=[
                self.compute(name, count) for name, count in output.num_scheduled_tokens.items()
            ],
        )
        result.kv_connector_output = copied
        made = self.scheduler.update_from_output(output, result)
        for each in made.values():
            self.counts["finished"] += sum(one.finish_reason is not None for one in each.outputs)

    def compute(self, name: str, count: int) -> list[int]:
        """Reads what is before, writes the blocks that are full now."""
        request = self.scheduler.requests[name]
        tokens, end = list(request.all_token_ids), request.num_computed_tokens
        table = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
        for block in range(end // BLOCK):
            value = expected(tokens, block, request.cache_salt)
            if (block + 1) * BLOCK <= end - count:
                self.counts["wrong"] += self.kv.get(table[block]) != value
            else:
                self.kv[table[block]] = value
        return [] if end < len(tokens) else [sum(tokens) % 1000]

    def copy(self) -> KVConnectorOutput:
        output, report = KVConnectorOutput(), Report({}, set())
        output.finished_recving = set()
        for job in [job for job in self.copies if self.dice.random() < 0.3]:
            self.copies.remove(job)
            if isinstance(job, Load):
                self.load(job, output)
            else:
                self.store(job, report)
        if report.ended:
            output.kv_connector_worker_meta = StepReport(report)
        return output

    def load(self, job: Load, output: KVConnectorOutput) -> None:
        self.counts["loads"] += 1
        good = job.pieces[0].blocks if job.pieces else 0
        if job.blocks and self.dice.random() < 0.2:
            good = self.dice.randrange(good + 1)
        names = self.node.lent.get(job.lease, [])
        for block, name in list(zip(job.blocks, names, strict=False))[:good]:
            self.kv[block] = self.node.bytes[name]
        bad = job.blocks[good:]
        for block in bad:
            self.kv[block] = "rubbish"
        self.counts["bad_loads"] += bool(bad)
        output.invalid_block_ids |= set(bad)
        assert output.finished_recving is not None
        output.finished_recving.add(job.request)

    def store(self, job: Store, report: Report) -> None:
        self.counts["stores"] += 1
        report.ended[job.job] = 1
        if self.dice.random() < 0.1:
            report.failed.add(job.job)
            return
        for grant in job.grants:
            for name in self.node.open.get(grant.reservation, []):
                self.node.bytes[name] = self.kv[job.blocks[grant.first - job.first]]

    def held(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return BLOCKS - 1 - pool.get_num_free_blocks()


def play(config: VllmConfig, seed: int) -> dict[str, int]:
    engine = Engine(config, seed)
    dice, lives = engine.dice, 1
    for _ in range(STEPS):
        chance = dice.random()
        if chance < 0.25 and len(engine.scheduler.requests) < 8:
            start, salt = dice.choice([0, 0, 0, 7000]), dice.choice([None, None, None, "a"])
            length = dice.randrange(20, 420)
            tokens = [start + i for i in range(length)]
            engine.add(tokens, dice.randrange(1, 90), salt)
        elif chance < 0.28 and engine.scheduler.requests:
            live = [n for n, r in engine.scheduler.requests.items() if not r.is_finished()]
            if live:
                engine.abort(dice.choice(live))
        elif chance < (0.29 if engine.node.session else 0.33):
            lives += 1
            engine.node.restart("" if engine.node.session and dice.random() < 0.5 else f"s{lives}")
        elif chance < 0.34:
            engine.node.silent = True
        elif chance < 0.42:
            engine.node.speak()
        engine.step(dice.choice([0.0, 0.01, 0.3]))
    engine.node.speak()
    for _ in range(3000):
        if not engine.scheduler.has_requests():
            break
        engine.step(0.1)
    return {
        **engine.counts,
        "left": len(engine.scheduler.requests),
        "held": engine.held(),
        "leases": len(engine.node.leases),
        "open": len(engine.node.open),
        "stored_blocks": len(engine.node.bytes),
    }


def main() -> None:
    config = EngineArgs(
        model=sys.argv[1],
        max_model_len=640,
        block_size=BLOCK,
        max_num_batched_tokens=640,
        max_num_seqs=6,
        enable_prefix_caching=True,
        long_prefill_token_threshold=96,
    ).create_engine_config()
    init_none_hash(sha256)
    config.kv_transfer_config = transfer(
        kv_connector="CheckedConnector",
        kv_connector_module_path="tests.cachenode.connectors.scheduler_checks",
    )
    print(json.dumps([play(config, seed) for seed in range(int(sys.argv[2]))]))
