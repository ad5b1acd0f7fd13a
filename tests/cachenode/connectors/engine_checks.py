"""Run by an engine's Python (it has torch and vLLM): what the connector reads of vLLM's own objects, and its
views of real tensors. Prints one JSON object; ``test_engine_checks.py`` looks at it."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from cachenode.connectors.memory_cpu import CpuMemory
from cachenode.connectors.memory_gpu import GpuMemory
from cachenode.connectors.regions import as_numpy, regions_of
from cachenode.connectors.vllm import HotprefixConnector, StepReport
from cachenode.connectors.vllm_facts import read_facts
from cachenode.connectors.work import Report
from tests.cachenode.connectors.engine_objects import BLOCKS, cache, full, transfer


def said(action: Callable[[], object]) -> str:
    """What a refusal says; "" where nothing is refused."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def refusals(config: VllmConfig) -> dict[str, str]:
    mamba = MambaSpec(block_size=32, shapes=((16, 8),), dtypes=(torch.float32,))
    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=3, head_size=64, dtype=torch.bfloat16, sliding_window=128
    )
    found = {
        "none": said(lambda: read_facts(config, cache(full()))),
        "hybrid": said(lambda: read_facts(config, cache(full(), mamba))),
        "windows": said(lambda: read_facts(config, cache(full(), window))),
        "window": said(lambda: read_facts(config, cache(window))),
        "mamba": said(lambda: read_facts(config, cache(mamba))),
        "block": said(lambda: read_facts(config, cache(full(24)))),
    }
    parallel = config.parallel_config
    for name, field, value in (
        ("pipeline", "pipeline_parallel_size", 2),
        ("machines", "nnodes", 2),
        ("context", "decode_context_parallel_size", 2),
    ):
        before = getattr(parallel, field)
        object.__setattr__(parallel, field, value)
        found[name] = said(lambda: read_facts(config, cache(full())))
        object.__setattr__(parallel, field, before)
    for name, changes in (
        ("policy", {"kv_load_failure_policy": "fail"}),
        ("unknown", {"kv_connector_extra_config": {"hotprefix.sokcet": "x", "hotprefix.worker": "e1"}}),
    ):
        config.kv_transfer_config = transfer(**changes)
        found[name] = said(lambda: read_facts(config, cache(full())))
    config.kv_transfer_config = transfer()
    return found


def layouts(config: VllmConfig) -> dict[str, Any]:
    facts = read_facts(config, cache(full()))
    again = read_facts(config, cache(full()))
    others = [read_facts(config, cache(full(64))), read_facts(config, cache(full(dtype=torch.float32)))]
    others.append(read_facts(config, cache(full(), layers=5)))
    prints = [one.layout.fingerprint() for one in (facts, *others)]
    return {
        "layout": {name: getattr(facts.layout, name) for name in facts.layout.__struct_fields__},
        "same": facts.layout.fingerprint() == again.layout.fingerprint(),
        "different": len(set(prints)) == len(prints),
        "blocks": facts.num_blocks,
        "worker": facts.worker,
    }


def views(layout: KVCacheLayout, kernel: int | None) -> bool:
    """Whether blocks saved from one cache and loaded into another, at other places, are the same KV."""
    spec, layers = full(), 4
    page, names = spec.page_size_bytes, [f"layer.{i}" for i in range(layers)]
    strides = (page * BLOCKS, page) if layout.is_layer_compact else (page, page * layers)
    row = page // spec.num_kv_heads
    if layout is KVCacheLayout.LHBNC:
        strides = (page * BLOCKS, row)
    elif layout is KVCacheLayout.BHLNC:
        strides = (row, page * layers)
    tensor = KVCacheTensor(
        size=page * BLOCKS * layers, layers=names, layer_stride=strides[0], block_stride=strides[1]
    )
    caches: list[tuple[list[torch.Tensor], CpuMemory]] = []
    for seed in (1, 2):
        raw = torch.randint(
            -100, 100, (tensor.size,), dtype=torch.int8, generator=torch.Generator().manual_seed(seed)
        )
        made = create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel)
        regions = regions_of(dict(zip(names, made, strict=True)), names, BLOCKS)
        caches.append((made, CpuMemory(as_numpy(regions))))
    (source, saver), (target, loader) = caches
    if saver.block_bytes != page * layers:
        return False
    buffer = np.zeros(3 * saver.block_bytes, np.uint8)
    saver.save([4, 0, 1], buffer)
    untouched = [layer.clone() for layer in target]
    loader.load([2, 3, 5], buffer)
    ratio = source[0].shape[0] // BLOCKS
    same = True
    for mine, theirs, before in zip(source, target, untouched, strict=True):
        split = [one.view(torch.int16).unflatten(0, (BLOCKS, ratio)) for one in (mine, theirs, before)]
        same &= bool((split[0][[4, 0, 1]] == split[1][[2, 3, 5]]).all())
        same &= bool((split[1][[0, 1, 4]] == split[2][[0, 1, 4]]).all())
    return same


class Late:
    """An event that is over when somebody waits for it: then the copy happens."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy: Callable[[], None] | None = copy

    def synchronize(self) -> None:
        if self._copy is not None:
            self._copy()
            self._copy = None


class LateDevice:
    """A device whose copies happen as late as they may."""

    block_bytes = 8

    def __init__(self) -> None:
        self.blocks = np.arange(160, dtype=np.uint8).reshape(20, 8)
        self.pending: list[Late] = []

    def pinned(self, size: int) -> Any:
        return np.zeros(size, np.uint8)

    def fence(self) -> None:
        pass

    def _later(self, copy: Callable[[], None]) -> Late:
        self.pending.append(Late(copy))
        return self.pending[-1]

    def gather(self, ids: Sequence[int], slot: Any) -> Late:
        def copy() -> None:
            slot.reshape(-1, 8)[...] = self.blocks[list(ids)]

        return self._later(copy)

    def scatter(self, ids: Sequence[int], slot: Any) -> Late:
        def copy() -> None:
            self.blocks[list(ids)] = slot.reshape(-1, 8)

        return self._later(copy)


def gpu_steps() -> bool:
    """Slots are not used again before their copy is over."""
    device = LateDevice()
    before = device.blocks.copy()
    memory = GpuMemory(device, slots=2, slot_bytes=24)
    ids = [3, 9, 4, 17, 0, 1, 2, 8]
    saved = np.zeros(8 * len(ids), np.uint8)
    memory.save(ids, saved)
    memory.finish()
    good = bool((saved.reshape(-1, 8) == before[ids]).all())
    moved = [(number + 5) % 20 for number in ids]
    memory.load(moved, saved)
    memory.finish()
    good &= bool((device.blocks[moved] == before[ids]).all())
    return good


def ranks() -> dict[str, Any]:
    """What vLLM makes of the outputs of two ranks, in two steps: loads end when both have ended them, stores are
    counted, bad blocks of one are bad."""
    aggregator = KVOutputAggregator(2)
    steps = (
        (({"r1"}, set(), {1: 1}, set()), (set(), {7}, {1: 1, 2: 1}, {2})),
        ((set(), set(), {}, set()), ({"r1"}, set(), {}, set())),
    )
    found: list[Any] = []
    for step in steps:
        outputs: list[ModelRunnerOutput | None] = []
        for loaded, bad, ended, failed in step:
            output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            output.kv_connector_output = KVConnectorOutput(
                finished_recving=loaded or None,
                invalid_block_ids=bad,
                kv_connector_worker_meta=StepReport(Report(ended, failed)) if ended else None,
            )
            outputs.append(output)
        merged = aggregator.aggregate(outputs)
        assert merged is not None
        assert merged.kv_connector_output is not None
        both = merged.kv_connector_output
        meta = both.kv_connector_worker_meta
        report = meta.report if isinstance(meta, StepReport) else Report({}, set())
        found.append(
            [
                sorted(both.finished_recving or ()),
                sorted(both.invalid_block_ids),
                sorted(report.ended.items()),
                sorted(report.failed),
            ]
        )
    return {"steps": found}


def main() -> None:
    config = EngineArgs(
        model=sys.argv[1], served_model_name=["smollm2", "other"], max_model_len=512, block_size=32
    ).create_engine_config()
    config.kv_transfer_config = transfer()

    print(
        json.dumps(
            {
                "refusals": refusals(config),
                "layouts": layouts(config),
                "views": {
                    f"{layout.name}/{kernel}": views(layout, kernel)
                    for layout in KVCacheLayout
                    for kernel in (
                        (None, 16) if layout.is_layer_compact and layout.value[1] == 1 else (None,)
                    )
                },
                "gpu": gpu_steps(),
                "ranks": ranks(),
                "hma": supports_hma(HotprefixConnector),
            }
        )
    )
