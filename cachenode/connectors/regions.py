"""The engine's KV tensors as bytes: views (parts, blocks, bytes) in which a block's bytes of one part lie
together. Parts are layers, or a layer's keys and values, or its heads, as the engine laid them out."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch


class BadTensors(ValueError):
    """KV tensors in which blocks cannot be found; the message says why."""


Part = tuple[int, int, int]
"""(offset of block 0, distance of blocks, bytes of a block), all in bytes from the storage's start."""


def parts_of(tensor: torch.Tensor, blocks: int) -> list[Part]:
    """Of one layer's tensor, in which some dimension counts the blocks, or equal pieces of them. Raises
    BadTensors."""
    item = tensor.element_size()
    shape, strides = list(tensor.shape), [stride * item for stride in tensor.stride()]
    axis = next((i for i, size in enumerate(shape) if size and size % blocks == 0 and size >= blocks), None)
    if axis is None:
        raise BadTensors(f"no dimension of {tuple(shape)} counts {blocks} blocks")
    pieces = shape[axis] // blocks
    distance = strides[axis]
    inner = sorted((strides[i], shape[i]) for i in range(len(shape)) if i != axis and strides[i] < distance)
    outer = sorted(
        (
            (strides[i], shape[i])
            for i in range(len(shape))
            if i != axis and strides[i] >= distance and shape[i] > 1
        ),
        reverse=True,
    )
    size = item
    while inner and (inner[0][0] == size or inner[0][1] == 1):
        stride, count = inner.pop(0)
        size *= count if stride == size else 1
    spread = sorted(((stride, count) for stride, count in inner if count > 1), reverse=True)
    if pieces > 1:
        if spread or size != distance:
            raise BadTensors(f"{pieces} pieces of a block do not lie together in {tuple(shape)}")
        size, distance = size * pieces, distance * pieces
    start = tensor.storage_offset() * item
    steps = [[stride * n for n in range(count)] for stride, count in (*outer, *spread)]
    return [(start + sum(offsets), distance, size) for offsets in itertools.product(*steps)]


def grouped(parts: Sequence[Part]) -> list[tuple[Part, int, int]]:
    """Neighbouring parts of one shape at equal distances: (first part, distance, how many)."""
    groups: list[tuple[Part, int, int]] = []
    for part in parts:
        if groups:
            (offset, distance, size), step, count = groups[-1]
            ahead = part[0] - offset - step * (count - 1)
            if part[1:] == (distance, size) and ahead > 0 and (count == 1 or ahead == step):
                groups[-1] = ((offset, distance, size), ahead, count + 1)
                continue
        groups.append((part, 0, 1))
    return groups


def regions_of(tensors: Mapping[str, torch.Tensor], layers: Sequence[str], blocks: int) -> list[torch.Tensor]:
    """Views of the layers' storage, in their order; a tensor that two layers share counts once, at the first.
    Raises BadTensors."""
    found: list[torch.Tensor] = []
    by_storage: list[tuple[torch.Tensor, list[Part]]] = []
    for layer in layers:
        if layer not in tensors:
            raise BadTensors(f"the engine did not register the layer {layer}")
        storage = tensors[layer].untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensors[layer].device).set_(storage)
        if not by_storage or by_storage[-1][0].data_ptr() != flat.data_ptr():
            by_storage.append((flat, []))
        parts = parts_of(tensors[layer], blocks)
        by_storage[-1][1].extend(part for part in parts if part not in by_storage[-1][1])
    for flat, parts in by_storage:
        for (offset, distance, size), step, count in grouped(parts):
            found.append(flat.as_strided((count, blocks, size), (step or 1, distance, 1), offset))
    return found


def storages(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """All bytes that the tensors lie in, each once."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        found[flat.data_ptr()] = flat
    return list(found.values())


def as_numpy(regions: Sequence[torch.Tensor]) -> list[npt.NDArray[np.uint8]]:
    """The same bytes for numpy; they must be in main memory."""
    return [region.numpy() for region in regions]
