"""The storages of tensors, also of those that are made of several."""

from collections.abc import Iterator
from typing import Any

import torch

from torchremat._torch import parts_of_coo, tree_flatten


def storages_in(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in `tree`, where a module stands for its parameters and buffers.

    A tensor in several (a sparse or nested tensor, a wrapper subclass) has one for each part; a
    storage may come more than once. One without storage (`mkldnn`) raises `NotImplementedError`.

    >>> x = torch.ones(6)
    >>> [storage.nbytes() for storage in storages_in({"a": x, "b": [x[:3], 1]})]
    [24, 24]
    """
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, torch.nn.Module):
            yield from storages_in([*leaf.parameters(), *leaf.buffers()])
        elif isinstance(leaf, torch.Tensor):
            parts = _parts(leaf)
            if parts is None:
                yield leaf.untyped_storage()
            else:
                yield from storages_in(parts)


def _parts(tensor: torch.Tensor) -> list[Any] | None:
    if hasattr(tensor, "__tensor_flatten__"):  # the protocol of wrapper subclasses
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    if tensor.layout is torch.sparse_coo:
        return list(parts_of_coo(tensor))
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None
