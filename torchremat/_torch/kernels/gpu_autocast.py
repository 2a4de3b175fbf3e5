"""The casts of the autocast of a GPU, for operators on CPU tensors that stand for some of one.

PyTorch registers kernels for the autocast of each kind of device, and casts tensors of that kind
alone. Which operators they are of, it tells; to which dtype each casts, is said here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

_LOW = (torch.float16, torch.bfloat16)
_FLOATS = (*_LOW, torch.float32)

# As in aten/src/ATen/autocast_mode.h; all others are cast to float32.
_TO_LOW = frozenset((
    "_addmm_activation", "_convolution", "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm",
    "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot",
    "linear", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
    "scaled_dot_product_attention",
))  # fmt: skip
_TO_WIDEST = frozenset((
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot", "vdot",
))  # fmt: skip
_WITH_DTYPE = frozenset((
    "prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "sum",
))  # fmt: skip
# They take a dtype, which is float32 unless the caller gives one.


def list_casts() -> Iterator[tuple[OpOverload, Callable[..., Any] | None]]:
    """Yield each operator whose casts differ from those of the CPU, with the function that casts.

    It takes the operator, its arguments and its keywords; `None` casts nothing.
    """
    on_gpu, on_cpu = (
        set(torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{kind}"))
        for kind in ("CUDA", "CPU")
    )
    for name in sorted(on_gpu | on_cpu):
        namespace, _, full = name.partition("::")
        packet, _, overload = full.partition(".")
        if namespace == "aten" and not (packet in _TO_LOW and name in on_cpu):
            op: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
            yield op, _find_cast(packet) if name in on_gpu else None


def _find_cast(packet: str) -> Callable[..., Any]:
    lists = ((_TO_LOW, _cast_to_low), (_TO_WIDEST, _cast_to_widest), (_WITH_DTYPE, _set_dtype))
    return next((cast for names, cast in lists if packet in names), _cast_to_float32)


def run_below_autocast(cast: Callable[..., Any], op: OpOverload, args: Any, kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return cast(op, args, kwargs)


def _cast_to_low(op: OpOverload, args: Any, kwargs: Any) -> Any:
    return _run_in(torch.get_autocast_dtype("cpu"), op, args, kwargs)


def _cast_to_float32(op: OpOverload, args: Any, kwargs: Any) -> Any:
    return _run_in(torch.float32, op, args, kwargs)


def _cast_to_widest(op: OpOverload, args: Any, kwargs: Any) -> Any:
    dtypes = {value.dtype for value in tensors_in(args)}
    if dtypes <= set(_LOW):
        return op(*args, **kwargs)
    return _run_in(torch.float32, op, args, kwargs)


def _set_dtype(op: OpOverload, args: Any, kwargs: Any) -> Any:
    place = [argument.name for argument in op._schema.arguments].index("dtype")
    given = args[place] if len(args) > place else kwargs.get("dtype")
    is_low = any(value.dtype in _LOW for value in tensors_in(args))
    if given is not None or not is_low:
        return op(*args, **kwargs)
    return op(*args[:place], **{**kwargs, "dtype": torch.float32})


def _run_in(dtype: torch.dtype, op: OpOverload, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.dtype in _FLOATS else value
        if isinstance(value, list | tuple):
            return [cast(item) for item in value]
        return value

    return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def tensors_in(args: Any) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor) and value.dtype in _FLOATS:
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
