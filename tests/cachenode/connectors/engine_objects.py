"""vLLM's configuration objects for the checks that run in an engine's Python."""

from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
)

BLOCKS = 6


def transfer(**changes: Any) -> KVTransferConfig:
    settings: dict[str, Any] = {
        "kv_connector": "HotprefixConnector",
        "kv_connector_module_path": "cachenode.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"hotprefix.socket": "/run/node.sock", "hotprefix.worker": "e1"},
    }
    return KVTransferConfig(**{**settings, **changes})


def full(block: int = 32, dtype: torch.dtype = torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=3, head_size=64, dtype=dtype)


def cache(*specs: KVCacheSpec, layers: int = 4, blocks: int = BLOCKS) -> KVCacheConfig:
    names = [f"layer.{i}" for i in range(layers)]
    groups = [KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec) for spec in specs]
    page = specs[0].page_size_bytes
    tensor = KVCacheTensor(
        size=page * blocks * layers, layers=names, layer_stride=page * blocks, block_stride=page
    )
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups)
