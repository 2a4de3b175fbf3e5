"""The function mode that turns tensors of the outside world into inputs of a trace.

A traced function may read tensors that it closes over. `CaptureMode` meets them as arguments of
PyTorch's functions, before any operator runs, and passes each through `lift`:

    fun = lambda x: x @ weight          torch.matmul(x, weight)
                                        torch.matmul(x, lift(weight))       lift adds an input
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from torchremat import _torch
from torchremat.core.interrupts import let_interrupts_in
from torchremat.core.source import current_source
from torchremat.errors import EffectError
from torchremat.tracing.ambient_state import gpu_stood_for, is_meta_as_cpu
from torchremat.tracing.input_spec import CPU
from torchremat.tracing.modules.backward_hooks import make_tensor_stand_in
from torchremat.tracing.value_guards import QUESTIONS, question

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

TENSOR_GETTERS = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")
)
"""Attributes whose value is a tensor, so that reading them is an operator of the graph."""


def map_arguments(mapping: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return mapping(value)
    if type(value) in (tuple, list):
        return type(value)(map_arguments(mapping, item) for item in value)
    if type(value) is dict:
        return {key: map_arguments(mapping, item) for key, item in value.items()}
    return value


_READS_OF_LAYOUT = {
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.nelement,
    Tensor.numel,
    Tensor.size,
    Tensor.storage_offset,
    Tensor.stride,
}


class CaptureMode(_torch.TorchFunctionMetadataMode):
    """Replaces tensors that the traced function closes over by inputs of the trace.

    Its base is the mode that `torch.cond` and its kin set aside while Dynamo captures their bodies,
    and restore to run them.
    """

    def __init__(
        self,
        tracer: _torch.PythonKeyTracer,
        lift: Callable[[Tensor], Tensor],
        truth_of: Callable[[Tensor], bool | None],
    ) -> None:
        super().__init__(tracer)
        self._tracer = tracer
        self._lift = lift
        self._truth_of = truth_of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in QUESTIONS and args:
            asked = question(func, map_arguments(self._lift, args))
            if asked is not None and (value := self._truth_of(asked)) is not None:
                return value
        if func is Tensor.register_hook:
            args, kwargs = self._stand_in_for_hook(*args, **(kwargs or {})), {}
        if func == _SET_DATA:
            if args[0] is args[1]:  # as `module.to` does with what stays as it is
                return None
            raise EffectError(
                f"the function gives a tensor other memory at {current_source()} (x.data = ...): "
                "a graph cannot. Write into the tensor: x.copy_(...)."
            )
        # PyTorch's own code, which makes meta tensors for fake ones, runs inside of an operator
        is_inside_operator = _torch.innermost_proxy_mode() is None
        redirects_meta = is_meta_as_cpu() and not is_inside_operator
        if getattr(func, "__name__", "") == "__get__" and func not in TENSOR_GETTERS:
            value = func(*args)  # x.shape needs no input, x.T does
            return _redirect_device(value) if redirects_meta else value
        if func in _READS_OF_LAYOUT:  # nor do these; a trace inside, which is over, asks them too
            return func(*args, **(kwargs or {}))
        # what has no tensor may set grad mode back, and C++ cannot take exceptions of all that it
        # calls inside of an operator
        if not is_inside_operator and any(isinstance(argument, Tensor) for argument in args):
            let_interrupts_in()
        if redirects_meta and func is not torch.device:
            func, args = _stay_on_cpu(func, args)
            args = tuple(map(_redirect_device, args))
            kwargs = {name: _redirect_device(value) for name, value in (kwargs or {}).items()}
        if func is torch.autograd.grad:
            func = self._differentiate
        elif args and _is_autograd_function(args[0]):  # `apply` under torch.func
            args = (_run_in_mode(args[0], self), *args[1:])
        if func in _torch.RECURRENT and torch.is_inference_mode_enabled():
            func = _outside_inference_mode(func)
        return self._call_lifted(func, args, kwargs or {})

    def _differentiate(
        self, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """`torch.autograd.grad`, in whose backward pass Python runs in this mode, too.

        PyTorch has set the mode aside. Rules of a `custom_vjp` or an `autograd.Function` would meet
        the tensors that they close over as they are outside of the trace.
        """
        is_one = isinstance(outputs, Tensor | GradientEdge)
        cotangents: Any = _EnterWhenRead(self, grad_outputs, 1 if is_one else len(outputs))
        with cotangents:
            return torch.autograd.grad(outputs, inputs, cotangents, *args, **kwargs)

    def _call_lifted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outside: dict[int, Tensor] = {}

        def lift(tensor: Tensor) -> Tensor:
            inside = self._lift(tensor)
            outside[id(inside)] = tensor
            return inside

        value = func(*map_arguments(lift, args), **map_arguments(lift, kwargs))
        # What returns its argument (`to` the dtype that it has) returns that of the caller, so that
        # `module.to(dtype)` sees a parameter that stays, and not another to put in its place.
        return outside.get(id(value), value)

    def _stand_in_for_hook(self, tensor: Tensor, hook: Any) -> tuple[Tensor, Any]:
        def is_traced(tensor: Tensor) -> bool:
            return _torch.proxy_of(tensor, self._tracer) is not None

        return tensor, make_tensor_stand_in(hook, is_traced)


class _EnterWhenRead:
    """Cotangents that enter `mode` when `torch.autograd.grad` reads them: it then runs the engine.

    Before that it asks whether there is a mode, which would set it aside again.
    """

    def __init__(self, mode: CaptureMode, cotangents: Any, count: int) -> None:
        self._mode = mode
        self._cotangents = cotangents
        self._count = count
        self._is_entered = False

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(self, *error: Any) -> None:
        if self._is_entered:  # a mode of the user, set aside like this one, may be back before it
            _torch.leave_function_mode(self._mode)

    def __iter__(self) -> Iterator[Tensor | None]:
        given = self._cotangents
        if given is None:
            given = [None] * self._count
        elif isinstance(given, Tensor):
            given = [given]
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._is_entered = True
        return iter(given)


def _is_autograd_function(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


_RULES = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")


def _run_in_mode(cls: type, mode: CaptureMode) -> type:
    """A class like `cls` whose methods run in `mode`, which PyTorch has set aside for its call."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if _torch.is_active(mode):
                return method(*args, **kwargs)
            with mode:
                return method(*args, **kwargs)

        return staticmethod(functools.wraps(method)(run))

    own = {
        name: wrap(getattr(cls, name))
        for name in _RULES
        if getattr(cls, name) is not getattr(torch.autograd.Function, name)
    }
    return type(cls.__name__, (cls,), {**own, "__module__": cls.__module__})


def _stay_on_cpu(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A function that asks for the GPU, as one that leaves tensors where they stand for it."""
    if gpu_stood_for() is None:
        return func, args
    if func is Tensor.cuda:
        return Tensor.to, (args[0], CPU)
    return func, args


def _redirect_device(value: Any) -> Any:
    if not isinstance(value, str | torch.device):
        return value
    gpu = gpu_stood_for()
    kinds = ("meta",) if gpu is None else ("meta", gpu.kind)
    kind = value.type if isinstance(value, torch.device) else value.partition(":")[0]
    return CPU if kind in kinds else value


def _outside_inference_mode(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return func(*args, **kwargs)

    return run
