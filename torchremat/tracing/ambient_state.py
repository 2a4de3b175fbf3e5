"""The state of PyTorch that changes what a function computes."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchremat import _torch
from torchremat.core.accelerators import is_here, list_kinds
from torchremat.tracing.axes.named_axes import AxisFrame, axis_environment, restore_axes


class Rules:
    """How often the rules for mapping operators over an axis have changed."""

    changes = 0


def switches() -> tuple[Any, ...]:
    """Inference mode, deterministic algorithms, the kernels allowed for attention; global hooks.

    Also the kinds of function modes, and how often batching rules changed.

    Hooks of all modules are compared by their handles; those of a trace do not count.
    """
    hooks = [
        handle
        for place in _torch.GLOBAL_MODULE_HOOKS
        if place
        for handle, hook in place.items()
        if not _torch.is_own_hook(hook)
    ]
    return (*(ask() for ask in _torch.SWITCHES), Rules.changes, *hooks)


class _MetaAsCpu(threading.local):
    is_on = False
    gpu: _torch.Gpu | None = None


_meta_as_cpu = _MetaAsCpu()


@contextmanager
def meta_as_cpu(gpu: _torch.Gpu | None = None) -> Iterator[None]:
    """In the block, a tensor on the meta device is traced as one on the CPU.

    So are fake tensors on a device that is not here, which PyTorch cannot differentiate.

    On the meta device PyTorch takes other operators than those that will run (attention comes as
    products of whole matrices), and refuses autocast. What a function makes by itself goes where
    its arguments are.

    With a `gpu` the tensors stand for some on it, and operators take its kernels. The function
    reads `cpu` as their device still: PyTorch cannot differentiate on one that is not here.
    """
    before = _meta_as_cpu.is_on, _meta_as_cpu.gpu
    _meta_as_cpu.is_on, _meta_as_cpu.gpu = True, gpu
    try:
        with ExitStack() as stack:
            if _is_elsewhere(_default_device()):
                stack.enter_context(torch.device("cpu"))
            if gpu is not None:
                stack.enter_context(_torch.stand_for_gpu(gpu))
            yield
    finally:
        _meta_as_cpu.is_on, _meta_as_cpu.gpu = before


def _default_device() -> torch.device:
    """The default device; PyTorch makes a tensor to find it, which is not a part of a trace."""
    with _torch.isolate():
        return torch.get_default_device()


def is_meta_as_cpu() -> bool:
    return _meta_as_cpu.is_on


def gpu_stood_for() -> _torch.Gpu | None:
    """The GPU for which CPU tensors of a trace stand, if they stand for one."""
    return _meta_as_cpu.gpu


def stands_in() -> bool | _torch.Gpu:
    """Whether tensors of a trace are on the CPU in place of another device, or for which GPU."""
    return _meta_as_cpu.gpu or _meta_as_cpu.is_on


def is_nowhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device, or a fake one on a device that is not here."""
    return tensor.is_meta or (_torch.is_fake(tensor) and _is_elsewhere(tensor.device))


def find_gpu(tensors: Iterable[torch.Tensor]) -> _torch.Gpu | None:
    """A GPU like an A100 for fake tensors on one that is not here, whose name nobody knows."""
    kinds = (t.device.type for t in tensors if not t.is_meta and is_nowhere(t))
    return _torch.Gpu("sm_80") if _torch.Gpu.kind in kinds else None


def _is_elsewhere(device: torch.device) -> bool:
    return device.type != "cpu" and not is_here(device)


@dataclass(frozen=True)
class AmbientState:
    """Autocast, the default dtype, and switches that operators and modules ask in Python.

    A function may be traced again in the backward pass, where they may be others; and what autograd
    computes there is computed without autocast.
    """

    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    default_dtype: torch.dtype = torch.float32
    switches: tuple[Any, ...] = ()
    axes: tuple[AxisFrame, ...] = ()
    """The named axes in scope."""
    caches_casts: bool = True
    """Whether autocast casts a leaf once, until its outermost block ends."""
    stands_in: bool | _torch.Gpu = False
    """Whether tensors on the meta device are traced as those on the CPU, or for which GPU."""
    modes: Sequence[Any] = field(default=(), compare=False)
    """The function modes of the user, whose types are among the switches."""

    @classmethod
    def now(cls) -> "AmbientState":
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in list_kinds()
            if torch.is_autocast_enabled(device)
        )
        return cls(
            autocast,
            torch.get_default_dtype(),
            switches(),
            axis_environment(),
            torch.is_autocast_cache_enabled(),
            stands_in(),
            _torch.function_modes(),
        )

    @contextmanager
    def restore(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        changes = before != self.default_dtype
        if changes:  # PyTorch has one for all threads
            torch.set_default_dtype(self.default_dtype)
        try:
            with without_autocast(), restore_axes(self.axes), ExitStack() as stack:
                stack.enter_context(cache_casts(self.caches_casts))
                if self.stands_in:
                    gpu = self.stands_in if isinstance(self.stands_in, _torch.Gpu) else None
                    stack.enter_context(meta_as_cpu(gpu))
                for device, dtype in self.autocast:
                    stack.enter_context(torch.autocast(device, dtype))
                in_force = _torch.function_modes()
                for mode in self.modes:
                    if not any(mode is other for other in in_force):
                        stack.enter_context(mode)
                yield
        finally:
            if changes:
                torch.set_default_dtype(before)


@contextmanager
def cache_casts(is_enabled: bool) -> Iterator[None]:
    """Let autocast cast a weight once that is read twice; PyTorch switches it off in a trace."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(is_enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def without_autocast() -> Iterator[None]:
    """A block without autocast: a graph has its casts as operators."""
    with ExitStack() as stack:
        for device, dtype in AmbientState.now().autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled=False))
        yield
