"""Kernels that are registered with PyTorch's dispatcher, for good or until they are restored."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload


@cache
def let_modes_see_views_of_zeros() -> torch.library.Library:
    """Let `view` of an efficient zero tensor, of which forward mode makes many, reach fake tensors.

    PyTorch's kernel takes the fake tensor's memory (other views fall through), so that `vmap` of
    `jvp` of `vmap` of `jvp` cannot be traced.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("view", torch.library.fallthrough_kernel, "ZeroTensor")
    return library


def replace_batching_rule(op: OpOverload, kernel: Callable[..., Any]) -> torch.library.Library:
    """Have `kernel` called where `op` is mapped by `vmap`, until `restore_batching_rule`.

    It is called with PyTorch's own kernel and the arguments of `op`, in which tensors are wrapped,
    at the innermost level, which is a `vmap`.
    """
    plain = torch.library.get_kernel(op, "FuncTorchBatched")

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(partial(plain.call_boxed, keys), *args, **kwargs)

    library = torch.library.Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(op, call, "FuncTorchBatched", with_keyset=True, allow_override=True)
    return library


def restore_batching_rule(library: torch.library.Library) -> None:
    library._destroy()
