"""Who uses the memory of a tensor."""

from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def is_view(tensor: torch.Tensor) -> bool:
    return tensor._is_view()


def is_view_of_leaf(tensor: torch.Tensor) -> bool:
    """Whether it shares the memory of a tensor that autograd did not make."""
    return tensor._base is not None and tensor._base.is_leaf


def tensor_uses(tensor: torch.Tensor) -> int:
    """How many refer to `tensor` in C++: 1 unless views or nodes of autograd's graph do, too."""
    return tensor._use_count()  # type: ignore[attr-defined,no-any-return]


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors, arrays and the like have the storage of `tensor`: 1 if only it has."""
    storage = tensor.untyped_storage()  # one use more
    return torch._C._storage_Use_Count(storage._cdata) - 1


def without_memory(cls: type[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A tensor of class `cls`, which has a `__torch_dispatch__`: the metadata of `like` alone.

    C++ code that asks for its memory raises `RuntimeError`: DLPack would pass on a null pointer.
    """
    tensor = torch.Tensor._make_wrapper_subclass(
        cls, like.shape, like.stride(), dtype=like.dtype, device=like.device
    )
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


swap_memory: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
"""Let two tensors exchange all but their Python classes and attributes."""


def count_hooks(tensor: torch.Tensor) -> int:
    """How many hooks `register_hook` has put on `tensor`, as autograd's record has it now."""
    return len(tensor._backward_hooks or ())


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks wait for the gradient of `tensor`, a leaf, in its place or after it."""
    return bool(tensor._post_accumulate_grad_hooks or tensor._backward_hooks)


def generator_id(generator: torch.Generator) -> int:
    """Equal for the Python objects of one generator, of which there may be several."""
    return generator._cdata  # type: ignore[attr-defined,no-any-return]


def version_of(tensor: torch.Tensor) -> int:
    return tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors have in common while they have one storage, also a fake one."""
    return int(tensor.untyped_storage()._cdata)


StorageReference = StorageWeakRef
"""A weak reference to a storage, which tells whether that is freed. Equal for one storage."""


def parts_of_coo(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse COO tensor, also of one that is not coalesced."""
    return tensor._indices(), tensor._values()


def negate_lazily(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose numbers are negated when they are read, as the imaginary part of `x.conj()`."""
    return torch._neg_view(tensor)
