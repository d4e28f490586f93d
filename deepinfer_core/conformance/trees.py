"""Inputs of a case as trees of tensors: copying to a device with strides kept, comparing, looking for shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with `function` applied to every tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(v, function) for v in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(v, function) for v in tree)
    if isinstance(tree, dict):
        return {k: map_tensors(v, function) for k, v in tree.items()}
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{f.name: map_tensors(getattr(tree, f.name), function) for f in fields(tree)})
    return tree


def tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with its path, e.g. `window.ring.data`."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name, value in zip(tree._fields, tree, strict=True):
            yield from tensors(value, f"{path}.{name}" if path else name)
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from tensors(value, f"{path}[{i}]")
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from tensors(value, f"{path}.{name}" if path else name)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from tensors(getattr(tree, field.name), f"{path}.{field.name}" if path else field.name)


def copy_to(tree: Any, device: torch.device) -> Any:
    """A deep copy on `device`. Whole storages are copied, so strides, gaps and views of one buffer stay what they are."""
    copies: dict[tuple[int, torch.dtype], Tensor] = {}

    def copy(t: Tensor) -> Tensor:
        key = (t.untyped_storage().data_ptr(), t.dtype)
        if key not in copies or not t.numel():
            whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
            copies[key] = whole.to(device, copy=True)
        return copies[key].as_strided(t.size(), t.stride(), t.storage_offset())

    return map_tensors(tree, copy)


def storage_bytes(t: Tensor) -> Tensor:
    """uint8 copy, on the CPU, of everything in the tensor's storage, gaps between rows included."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).cpu().clone()


def over(storage: Tensor, t: Tensor) -> Tensor:
    """The view of `t` on uint8 bytes of (a copy of) its storage: the same elements, one more dim of `t.element_size()` bytes."""
    size = t.element_size()
    strides = [stride * size for stride in t.stride()]
    return storage.as_strided((*t.shape, size), (*strides, 1), t.storage_offset() * size)


def strided(x: Tensor, gap: int = 8) -> Tensor:
    """x [T, ..., d] as a view into wider rows; the gap holds NaN (floats) or the largest value (integers)."""
    poison = torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).max
    flat = x.reshape(x.shape[0], -1)
    wide = torch.full((x.shape[0], flat.shape[1] + gap), poison, dtype=x.dtype)
    wide[:, : flat.shape[1]] = flat
    return wide.as_strided(x.shape, (wide.stride(0), *x.contiguous().stride()[1:]))
