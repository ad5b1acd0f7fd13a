"""What vLLM's own configuration says about its KV, read into a Layout; what cannot work is refused at start
with a message that says what to change. The only file that knows vLLM's configuration objects."""

import math
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    compute_layer_kv_cache_shape_bytes,
)
from vllm.version import __version__

from cachenode.connectors.options import BadSetup, Options, check_policy, read_options
from cachenode.connectors.revision import revision_of
from cachenode.record import BadLayout, Layout


class Facts(msgspec.Struct, frozen=True):
    """``layers``: names of the layers with KV of their own, in the order of a block's bytes. ``num_blocks``
    are the engine's. ``worker``: the configured name, of a data-parallel rank with its number."""

    options: Options
    layout: Layout
    layers: list[str]
    num_blocks: int
    worker: str


def read_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Facts:
    """Raises BadSetup."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise BadSetup("--kv-transfer-config is missing")
    check_policy(transfer.kv_load_failure_policy)
    options = read_options(transfer.kv_connector_extra_config)
    _check_ranks(vllm_config.parallel_config)
    spec = _spec(kv_cache_config)
    layers = [name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers]
    layout = _layout(vllm_config, kv_cache_config, spec, len(layers))
    try:
        layout.check()
    except BadLayout as error:
        raise BadSetup(f"hotprefix: {error}; choose another --block-size") from error
    parallel = vllm_config.parallel_config
    worker = options.worker
    if parallel.data_parallel_size > 1:
        worker += f"-{parallel.data_parallel_index}"
    return Facts(options, layout, layers, kv_cache_config.num_blocks, worker)


def _check_ranks(parallel: Any) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise BadSetup("hotprefix: ranks of a pipeline are not supported: --pipeline-parallel-size must be 1")
    if parallel.nnodes > 1:
        raise BadSetup("hotprefix: ranks on several machines are not supported: --nnodes must be 1")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise BadSetup("hotprefix: context parallelism is not supported: a block would be spread over ranks")


def _spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    """The only group's."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups})) or "none"
        raise BadSetup(
            f"hotprefix: this model keeps its KV in {len(groups)} groups ({kinds}): hybrid models "
            "(Mamba, GDN, sliding window beside full attention) are not supported yet; "
            "start without --kv-transfer-config"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise BadSetup(
            f"hotprefix: KV of the kind {type(spec).__name__} is not supported: only full attention "
            "keeps every block of a prefix; start without --kv-transfer-config"
        )
    assert isinstance(spec, FullAttentionSpec)
    return spec


def _layout(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, spec: FullAttentionSpec, layers: int
) -> Layout:
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    heads = spec.num_kv_heads
    return Layout(
        family="vllm",
        model=served_name(vllm_config),
        revision=_revision(vllm_config),
        memory=_memory(vllm_config, kv_cache_config, spec),
        dtype=f"{str(spec.dtype).removeprefix('torch.')}/{cache.cache_dtype}/{spec.kv_quant_mode.name}",
        layers=layers,
        heads=heads,
        head_size=model.get_head_size() or spec.head_size,
        block_tokens=spec.block_size,
        block_bytes=layers * math.prod(compute_layer_kv_cache_shape_bytes(spec, 1)),
        ranks=vllm_config.parallel_config.tensor_parallel_size,
    )


def served_name(vllm_config: VllmConfig) -> str:
    """The first id in ``/v1/models``: the model's part of a namespace."""
    name = vllm_config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)


def _revision(vllm_config: VllmConfig) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    config = dict(model.hf_config.to_dict())
    said = [model.revision, getattr(model.hf_config, "_commit_hash", None)]
    engine = {
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "load_format": load.load_format,
        "seed": model.seed if load.load_format == "dummy" else None,
        "speculative": _speculative(vllm_config),
    }
    try:
        return revision_of(model.model, str(said), {"model": config, "engine": engine})
    except OSError as error:
        raise BadSetup(f"hotprefix: the model folder cannot be read: {error}") from error


def _speculative(vllm_config: VllmConfig) -> str:
    """Names the drafter, whose layers lie in the blocks too."""
    speculative = vllm_config.speculative_config
    return "" if speculative is None else f"{speculative.method}:{speculative.model}"


def _memory(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, spec: FullAttentionSpec) -> str:
    """Names the order of bytes inside a block: device, physical order, and what its kernels make of it. On
    CPU the instruction set decides how keys are packed."""
    layout = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout or "default"
    if current_platform.is_cpu():
        kernels = _cpu_kernels(vllm_config, spec)
    else:
        backend = vllm_config.attention_config.backend
        name = "auto" if backend is None else backend.name
        kernels = f"{name}:{current_platform.get_device_name()}"
    return f"vllm-{__version__}/{current_platform.device_type}/{layout}/{kernels}"


def _cpu_kernels(vllm_config: VllmConfig, spec: FullAttentionSpec) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - only where it exists

    isa: str = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    return isa
