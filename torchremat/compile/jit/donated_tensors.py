"""Tensors whose storage was donated: the conditions, and what is left of them."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.errors import DonationError


class DonatedTensor(Tensor):
    """A tensor after its donation: its shape, dtype and device can still be read.

    Any use of its values raises `DonationError`, which names the call that took it.
    """

    donated_to: str
    """The call: `jit(step) at train.py:12 (main)`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return cls._refuse(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse uses that do not pass `__torch_function__`: `torch.tensor`, `torch.func`."""
        cls._refuse(func, args, kwargs or {})

    @staticmethod
    def _refuse(
        func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoReturn:
        for leaf in _torch.tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, DonatedTensor):
                raise DonationError(leaf.describe_misuse(_name_of(func)))
        raise AssertionError(f"{func} was called for a donated tensor without one")

    def describe_misuse(self, use: str) -> str:
        return (
            f"{use} uses the values of a tensor {Aval.of(self)} that was donated to "
            f"{self.donated_to}: its storage may be that of an output now. Use what the call "
            "returned, donate a copy (x.clone()), or take the argument out of donate_argnums and "
            "donate_argnames."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DonatedTensor({Aval.of(self)}, donated to {self.donated_to})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


_METADATA = {
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad",
        "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mps",
        "is_nested", "is_xpu", "is_mkldnn",
    )),
    *(getattr(Tensor, name) for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point",
        "is_complex", "is_signed", "get_device", "__len__", "__hash__",
    )),
    torch.is_tensor, torch.numel, torch.is_floating_point, torch.is_complex,
}  # fmt: skip


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", repr(func))
    if name in ("__get__", "__set__"):  # of a property
        return str(func.__self__.__name__)  # type: ignore[attr-defined]
    return name if name.startswith("__") else name.partition(".")[0]


def reason_not_donatable(tensor: Tensor) -> str | None:
    """A reason unless `tensor` alone owns its storage: no view, no base, not saved by autograd."""
    if type(tensor) is not Tensor:
        if isinstance(tensor, nn.Parameter):
            return (
                "it is a parameter, which its module goes on using. Donate plain tensors: take the "
                "parameters out with torch.func.functional_call, or {n: p.detach().clone() ...}"
            )
        return f"it is a {type(tensor).__name__}; only plain tensors can be donated"
    for applies, reason in _OWNERSHIP:
        if applies(tensor):
            return reason
    return None


_OWNERSHIP: tuple[tuple[Callable[[Tensor], bool], str], ...] = (
    (
        lambda tensor: tensor.is_inference() and not torch.is_inference_mode_enabled(),
        "it was made in inference mode, which is off: it cannot be written to here",
    ),
    (_torch.is_view, "it is a view of another tensor, which would lose its values. Donate a copy"),
    (
        lambda tensor: _torch.tensor_uses(tensor) > 1,
        "something else refers to it: a view of it, or what autograd saves for a backward pass. "
        "Drop that first (del), or donate a copy",
    ),
    (
        lambda tensor: _torch.storage_uses(tensor) > 1,
        "another tensor or an array shares its storage (detach(), numpy(), what autograd saves). "
        "Drop that first (del), or donate a copy",
    ),
    (
        lambda tensor: not tensor.untyped_storage().resizable(),
        "its memory is not PyTorch's alone (torch.from_numpy, numpy(), shared memory, a file). "
        "Donate a copy",
    ),
)


def take(tensor: Tensor, call: str) -> Tensor:
    """A tensor that has the memory of `tensor`, which becomes a `DonatedTensor`."""
    stand_in = _torch.without_memory(DonatedTensor, tensor)
    _torch.swap_memory(tensor, stand_in)
    tensor.__class__, stand_in.__class__ = DonatedTensor, Tensor
    tensor.donated_to = call  # type: ignore[attr-defined]
    return stand_in
