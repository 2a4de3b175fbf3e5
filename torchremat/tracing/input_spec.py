"""The layout of an input of a trace, and how autograd sees it; refusals of other tensors."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.errors import DonationError, TraceError
from torchremat.tracing.ambient_state import is_meta_as_cpu, is_nowhere
from torchremat.tracing.dtensors import Sharding, local_tensor

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The facts about an input that a trace depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool
    storage_offset: int = field(default=0, compare=False)
    """Where in its storage it begins, which only `as_strided` asks."""
    sharding: Sharding | None = None
    """How the tensor is spread over processes; the rest is of what this one holds."""
    is_conj: bool = False
    """Whether its numbers are conjugated when they are read, which Python can ask."""
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, any_level: bool = False) -> "InputSpec":
        """The spec of `tensor`; `any_level` asks the levels of `torch.func` too."""
        _refuse_kind(tensor)
        with _torch.without_function_modes():
            requires_grad = (
                _torch.requires_grad_at_any_level(tensor) if any_level else tensor.requires_grad
            )
            is_leaf, sharding = tensor.is_leaf, Sharding.of(tensor)
            tensor = local_tensor(tensor)
            return cls(
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
                CPU if is_meta_as_cpu() and is_nowhere(tensor) else tensor.device,
                requires_grad,
                is_leaf,
                _torch.offset_of(tensor),
                sharding,
                tensor.is_conj(),
                tensor.is_neg(),
            )

    def empty(self) -> Tensor:
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if isinstance(self.storage_offset, int) and self.storage_offset > 0:
            length = self.storage_offset + empty.untyped_storage().nbytes() // self.dtype.itemsize
            whole = torch.empty(length, dtype=self.dtype, device=self.device)
            empty = whole.as_strided(self.shape, self.stride, self.storage_offset).detach()
        if self.is_conj:
            empty = empty.conj().detach()
        if self.is_neg:
            empty = _torch.negate_lazily(empty).detach()
        return empty.requires_grad_(self.requires_grad)


def _refuse_kind(tensor: Tensor) -> None:
    if hasattr(type(tensor), "describe_misuse"):  # it was donated
        raise DonationError(tensor.describe_misuse("a traced function"))  # type: ignore[attr-defined]
    if tensor.is_nested:
        raise TraceError(
            f"cannot trace a nested tensor (layout {tensor.layout}): its ragged size has no place "
            "in a graph. Pass x.values() and x.offsets(), or x.to_padded_tensor(0.0)."
        )
    if tensor.layout != torch.strided:
        raise TraceError(
            f"cannot trace a tensor of layout {tensor.layout}: shape {tuple(tensor.shape)}; "
            "only strided (dense) tensors are inputs of a graph. Convert it with .to_dense()."
        )
    if tensor.is_quantized:
        raise TraceError(
            f"cannot trace a quantized tensor ({tensor.dtype}): shape {tuple(tensor.shape)}. "
            "Convert it with .dequantize()."
        )
    kinds = (vars(kind).get("__torch_function__") for kind in type(tensor).__mro__)
    if next(filter(None, kinds)) not in _torch.PLAIN_TORCH_FUNCTIONS:
        raise TraceError(
            f"cannot trace a {type(tensor).__name__}: it redefines functions of PyTorch "
            "(__torch_function__), which a graph of operators would not call. Pass a plain tensor: "
            "x.as_subclass(torch.Tensor)."
        )
