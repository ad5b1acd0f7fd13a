"""vLLM's door to the node: ``HotprefixConnector``, split by role. Start an engine with

    --kv-transfer-config '{"kv_connector": "HotprefixConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "cachenode.connectors.vllm", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"hotprefix.socket": "…/node.sock", "hotprefix.worker": "e1"}}'

and this package on PYTHONPATH. An engine starts and serves without a node, and picks it up when it appears.
"""

import secrets
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cachenode.attachment import Attachment
from cachenode.client import NodeClient
from cachenode.connectors.adapters import Adapters
from cachenode.connectors.jobs import Results
from cachenode.connectors.link import Link
from cachenode.connectors.naming import Namer
from cachenode.connectors.options import read_secret
from cachenode.connectors.places import Attached
from cachenode.connectors.vllm_facts import Facts, read_facts
from cachenode.connectors.vllm_scheduler import SchedulerSide
from cachenode.connectors.vllm_worker import WorkerSide
from cachenode.connectors.work import Report, Work

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class StepWork(KVConnectorMetadata):  # type: ignore[misc]
    """What a step carries from the scheduler to the workers."""

    def __init__(self, work: Work) -> None:
        self.work = work


class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a step carries back, of all ranks."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        assert isinstance(other, StepReport)
        return StepReport(self.report.merge(other.report))


class HotprefixConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One object per process and role. Raises BadSetup at start where the engine's settings do not fit."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._facts = read_facts(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._results = Results()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self.make_scheduler_side(self._facts)
        else:
            self._worker = worker_side(self._facts, get_tensor_model_parallel_rank())

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that does not happen is a later miss."""
        return False

    def make_scheduler_side(self, facts: Facts) -> SchedulerSide:
        """The scheduler's parts, with a real clock and a connection to the node."""
        return scheduler_side(facts)

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._at_scheduler.pool.bind(gpu_block_pool)

    @property
    def _at_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler

    @property
    def _at_worker(self) -> WorkerSide:
        assert self._worker is not None, "called in the scheduler"
        return self._worker

    def on_new_request(self, request: "Request") -> None:
        self._at_scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._at_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._at_scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return StepWork(self._at_scheduler.work(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        meta = connector_output.kv_connector_worker_meta
        self._at_scheduler.ended(
            connector_output.invalid_block_ids,
            connector_output.finished_recving or set(),
            meta.report if isinstance(meta, StepReport) else None,
        )

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the blocks' release: those being copied are held by references of their own."""
        self._at_scheduler.finished(request, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.pending

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.copying

    def reset_cache(self) -> bool:
        """The explicit reset of connectors; an engine's own prefix cache is reset without it."""
        self._at_scheduler.forget()
        return True

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._at_worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the step computes: its copies start here, beside the computation."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepWork)
        self._at_worker.begin(connector_metadata.work)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Loads are asynchronous and have begun."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is computed only after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are copied over all layers at once, in a later step."""

    def wait_for_save(self) -> None:
        """Sources are held by the scheduler until they are copied."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads that ended; the results are kept for the two calls that follow in the same step."""
        self._results = self._at_worker.results()
        return None, self._results.loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._results.bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return StepReport(self._results.report) if self._results.report.ended else None

    # Both

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


def scheduler_side(facts: Facts) -> SchedulerSide:
    """The scheduler's parts, with a real clock and a connection to the node."""
    options = facts.options
    client = NodeClient(
        options.socket,
        facts.layout,
        facts.worker,
        lambda: secrets.token_hex(16),
        time.monotonic,
        mode=options.mode,
    )
    link = Link(client, time.monotonic)
    link.start()
    layout = facts.layout
    namer = Namer(layout.model, layout.block_tokens, read_secret(options.secret_file))
    return SchedulerSide(facts, link, namer, Adapters(), time.monotonic)


def worker_side(facts: Facts, rank: int) -> WorkerSide:
    """A worker's parts; sessions are joined when the scheduler names them."""
    options = facts.options

    def attach(session: str) -> Attached | None:
        return Attachment.join(
            options.socket, facts.layout, facts.worker, session, rank=rank, mode=options.mode
        )

    return WorkerSide(facts, rank, attach)
