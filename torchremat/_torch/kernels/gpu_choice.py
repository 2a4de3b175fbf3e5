"""Let operators that have other kernels on a GPU take those, in traces on fake CPU tensors.

The operators are composed of others, of which PyTorch takes some by the device. A library of the
dispatcher stands before them while a trace asks for it; other threads meet PyTorch's own kernels.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake

from . import gpu_attention, gpu_autocast, gpu_layers, gpu_recurrent
from .gpu import Gpu

aten = torch.ops.aten

_CHOICES: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        aten.scaled_dot_product_attention.default: gpu_attention.attend,
        aten.dropout.default: gpu_layers.drop,
        aten.softmax.int: gpu_layers.normalize_exponentials(aten._softmax.default),
        aten.log_softmax.int: gpu_layers.normalize_exponentials(aten._log_softmax.default),
        aten.rms_norm.default: gpu_layers.normalize_rms,
        aten._batch_norm_impl_index.default: gpu_layers.normalize_batch,
        aten.lstm_cell.default: gpu_layers.run_lstm_cell,
        aten.gru_cell.default: gpu_layers.run_gru_cell,
        aten.lstm.input: gpu_recurrent.run_lstm,
        aten.gru.input: gpu_recurrent.run_gru,
        aten.rnn_tanh.input: gpu_recurrent.run_tanh,
        aten.rnn_relu.input: gpu_recurrent.run_relu,
    }
)

_SHAPES: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        aten._thnn_fused_lstm_cell.default: gpu_layers.fake_lstm_cell,
        aten._thnn_fused_gru_cell.default: gpu_layers.fake_gru_cell,
        aten._thnn_fused_gru_cell_backward.default: gpu_layers.fake_gru_cell_backward,
        aten._cudnn_rnn.default: gpu_recurrent.fake_cudnn_rnn,
        aten._cudnn_rnn_backward.default: gpu_recurrent.fake_cudnn_rnn_backward,
    }
)
# Of these kernels PyTorch has no rule for fake tensors, for it runs them on the device. Its rule
# for cuDNN's layers gives them nothing for the backward pass, and that of LSTM cells wants biases.


class _GpusOfThread(threading.local):
    def __init__(self) -> None:
        self.gpus: list[Gpu] = []


_entered = _GpusOfThread()
_lock = threading.Lock()
_in_use: list[torch.library.Library] = []
# The library, and once more for each block that is entered.


@contextmanager
def choose_as_gpu(gpu: Gpu) -> Iterator[None]:
    """In the block, operators on CPU tensors take the kernels that `gpu` has, in this thread.

    There are only rules of shapes for these kernels: the tensors must be fake.
    """
    with _lock:
        if not _in_use:
            _in_use.append(_new_library())
        _in_use.append(_in_use[0])
    _entered.gpus.append(gpu)
    try:
        yield
    finally:
        _entered.gpus.pop()
        with _lock:
            _in_use.pop()
            if len(_in_use) == 1:
                _in_use.pop()._destroy()


def _new_library() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for op, choose in _CHOICES.items():
            for key in _keys_of(op):
                kernel = partial(_choose, torch.library.get_kernel(op, key), choose)
                library.impl(op, kernel, key, with_keyset=True, allow_override=True)
        for op, cast in gpu_autocast.list_casts():
            kernel = partial(_cast, _autocast_kernel(op), op, cast)
            library.impl(op, kernel, "AutocastCPU", with_keyset=True, allow_override=True)
        for op, shape in _SHAPES.items():
            library.impl(op, shape, "Meta", allow_override=True)
    return library


def _keys_of(op: OpOverload) -> Iterator[str]:
    """Where an operator becomes others: at autograd, or before it if `torch.func` has a rule."""
    yield "AutogradCPU"
    if op is not aten.rms_norm.default:  # under vmap a GPU composes it of others, too
        for key in ("FuncTorchDynamicLayerFrontMode", "FuncTorchVmapMode", "FuncTorchBatched"):
            if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
                yield key


def _autocast_kernel(op: OpOverload) -> Callable[..., Any]:
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU"):
        return torch.library.get_kernel(op, "AutocastCPU").call_boxed
    return partial(_redispatch, op)


def _redispatch(op: OpOverload, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return op.redispatch(keys - gpu_autocast.AUTOCAST, *args, **kwargs)


def _cast(
    plain: Callable[..., Any],
    op: OpOverload,
    cast: Callable[..., Any] | None,
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    tensors = gpu_autocast.tensors_in(args)
    if not _entered.gpus or not any(map(is_fake, tensors)):
        return plain(keys, *args, **kwargs)
    if cast is None:
        return _redispatch(op, keys, *args, **kwargs)
    return gpu_autocast.run_below_autocast(cast, op, args, kwargs)


def _choose(plain: Any, choose: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
    run = partial(plain.call_boxed, keys)
    if not _entered.gpus or not is_fake(args[0]):
        return run(*args, **kwargs)
    return choose(_entered.gpus[-1], run, *args, **kwargs)
