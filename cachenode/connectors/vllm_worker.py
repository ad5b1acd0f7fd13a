"""A worker's side of the vLLM connector: the engine's tensors, attachments to the node, and copy threads."""

import logging
import os
import threading
from collections.abc import Mapping
from typing import Protocol

import torch

from cachenode.connectors.jobs import Jobs, Results
from cachenode.connectors.memory_cpu import CpuMemory, touch
from cachenode.connectors.memory_gpu import GpuMemory, TorchDevice
from cachenode.connectors.places import Attach, Places
from cachenode.connectors.regions import BadTensors, as_numpy, regions_of, storages
from cachenode.connectors.transfer import Memory, Transfer
from cachenode.connectors.vllm_facts import Facts
from cachenode.connectors.work import Work

log = logging.getLogger("vllm.hotprefix")

IDLE_WAIT_S = 0.005
"""Longest wait for copies in a step that computes nothing; a new request waits as long at most."""


class EngineMemory(Memory, Protocol):
    """``fence``, in the engine's thread: what the engine has begun until now comes before the copies that
    begin from now on."""

    def fence(self) -> None: ...


class WorkerSide:
    """Lives in one rank's process. The engine's thread calls; copies run in threads of their own."""

    def __init__(self, facts: Facts, rank: int, attach: Attach) -> None:
        self._facts, self._rank = facts, rank
        self._places = Places(attach)
        self._memories: list[EngineMemory] = []
        self._jobs: Jobs | None = None
        self._idle = False

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The engine's KV. Raises BadTensors where it is not what the layout says."""
        layout = self._facts.layout
        regions = regions_of(tensors, self._facts.layers, self._facts.num_blocks)
        memories = [memory_of(regions), memory_of(regions)]
        if memories[0].block_bytes != layout.block_bytes:
            raise BadTensors(
                f"a block of this engine has {memories[0].block_bytes} bytes, "
                f"its settings say {layout.block_bytes}"
            )
        self._memories = memories
        loader, storer = (Transfer(memory, self._rank) for memory in memories)
        on_cpu = regions[0].device.type == "cpu"
        if on_cpu and self._facts.options.touch and not all(map(touch, as_numpy(storages(tensors)))):
            log.info("hotprefix: the engine's KV pages are taken when they are first written")
        self._jobs = Jobs(loader, storer, self._places, _roam if on_cpu else _stay)
        log.info("hotprefix: %d regions of KV, %d bytes a block", len(regions), layout.block_bytes)

    def begin(self, work: Work) -> None:
        """Before the step computes: start its copies, whose sources earlier steps have computed."""
        self._idle = work.idle
        if self._jobs is None:
            return
        self._places.follow(work.session, self._jobs.sessions)
        if work.loads or work.stores:
            for memory in self._memories:
                memory.fence()
            self._jobs.put(work.loads, work.stores)

    def results(self) -> Results:
        """What ended since the last step."""
        if self._jobs is None:
            return Results()
        return self._jobs.take(IDLE_WAIT_S if self._idle else 0.0)

    def close(self) -> None:
        if self._jobs is not None:
            self._jobs.close()
        self._places.close()


def memory_of(regions: list[torch.Tensor]) -> EngineMemory:
    """Copies for where the engine's KV lies."""
    if regions[0].device.type == "cpu":
        return CpuMemory(as_numpy(regions))
    return GpuMemory(TorchDevice(regions))


def _stay(nice: int) -> None:
    thread = threading.get_native_id()
    if nice:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


def _roam(nice: int) -> None:
    """vLLM binds its threads to cores, and a new thread inherits that. A copy thread takes any core that has
    time, so that it does not stand in the way of the one that computes."""
    _stay(nice)
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError as error:
        log.info("hotprefix: copy threads stay on the engine's cores: %s", error)
