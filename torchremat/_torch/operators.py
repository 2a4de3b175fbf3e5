"""Rules that give operators, higher-order and custom ones, their derivatives and batching."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import DispatchKey as DispatchKey
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    get_proxy_slot,
    track_tensor_tree,
)

from .engine import direct_apply, in_dual_level
from .functorch import add_batch_dim, has_tangents, unwrap_batched_tensor
from .pytrees import tree_flatten, tree_unflatten


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """The schema of `op`: `name`, `arguments`, `returns`, `is_mutable`, ...

    `_schema` has no public name; PyTorch's own documentation of custom operators reads it.
    """
    return op._schema


def schema_arguments(op: OpOverload) -> list[Any]:
    return list(op._schema.arguments)


def is_reduction(target: Any) -> bool:
    tag = getattr(torch.Tag, "reduction", None)
    return isinstance(target, OpOverload) and tag in target.tags


def get_boxed_call(op: OpOverload) -> Callable[..., Any]:
    """The operator as a builtin, without the Python prologue of `OpOverload.__call__`."""
    return op._op


def dispatch_call(op: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    """Hand a call of `op` to its rule for where it stands, without what its `__call__` does."""
    return HigherOrderOperator.__call__(op, *args, **kwargs)


# A tangent that forward mode knows to be zero, and numbers whose reader conjugates or negates.
# PyTorch skips the autocast of CPU, CUDA and XPU alone: Apple's and others' are devices too.
_SKIPPED = (
    DispatchKey.ZeroTensor,
    DispatchKey.Conjugate,
    DispatchKey.Negative,
    *(getattr(DispatchKey, name) for name in dir(DispatchKey) if name.startswith("Autocast")),
)


def register_simple_rules(op: HigherOrderOperator, run: Callable[..., Any]) -> None:
    """Give `op` its rules below autograd, all from `run`: dense, fake, traced, functionalised.

    Derivatives and batching stand above, in an `autograd.Function` that calls the op.
    """

    def dense(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def autograd(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return dispatch_call(op, *args, **kwargs)

    def fake(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    def trace(mode: ProxyTorchDispatchMode, *args: Any, **kwargs: Any) -> Any:
        tracer = mode.tracer
        proxies = [_as_proxy(a, tracer) for a in args]
        proxy = tracer.create_proxy("call_function", op, tuple(proxies), dict(kwargs))
        result = dispatch_call(op, *args, **kwargs)
        return track_tensor_tree(result, proxy, constant=None, tracer=tracer)

    def functionalize(context: Any, *args: Any, **kwargs: Any) -> Any:
        inner = context.unwrap_tensors(args)
        with context.redispatch_to_next():
            return context.wrap_tensors(dispatch_call(op, *inner, **kwargs))

    for key in _SKIPPED:
        op.fallthrough(key)
    op.py_impl(DispatchKey.CompositeExplicitAutograd)(dense)
    op.py_impl(DispatchKey.Autograd)(autograd)
    op.py_impl(FakeTensorMode)(fake)
    op.py_impl(ProxyTorchDispatchMode)(trace)
    op.py_functionalize_impl(functionalize)


def register_derivative_rules(
    op: HigherOrderOperator,
    apply: Callable[..., Any],
    forward_rule: Callable[..., Any] | None = None,
) -> None:
    """Let autograd and the levels of `torch.func` see `op` as `apply`, an `autograd.Function`'s.

    It is called with the arguments of `op` where they stand: in a graph that is interpreted under
    a transformation, say. `forward_rule` serves `torch.func.jvp` instead, if given.
    """

    def autograd(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(getattr(a, "requires_grad", False) for a in args):
            return apply(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return dispatch_call(op, *args, **kwargs)

    def transform(_: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(*args, **kwargs)

    def push_forward(_: Any, *args: Any, **kwargs: Any) -> Any:
        return (forward_rule or apply)(*args, **kwargs)

    op.py_kernels.pop(DispatchKey.Autograd, None)
    op.py_impl(DispatchKey.Autograd)(autograd)
    op.py_impl(TransformType.Grad)(transform)
    op.py_impl(TransformType.Vmap)(transform)
    op.py_impl(TransformType.Jvp)(push_forward)


def register_axis_rules(
    op: HigherOrderOperator,
    function: type[torch.autograd.Function] | None,
    batched: Callable[..., tuple[torch.Tensor, int | None]],
) -> None:
    """Give `op` its rules for autograd and for the levels of `torch.func`.

    Each level calls them on tensors of its own. Those that it does not map over or differentiate
    are among them, which the rules of an `autograd.Function` never see. `batched` takes the level,
    its size, the arguments as pairs of a tensor and the dimension mapped over, or `None`, and
    keywords. It returns such a pair. `function.apply` takes a function that runs `op` beneath,
    `op`, its keywords as a dict, and tensors. As in `register_function`, it is for operators that
    are linear, or linear in pieces. Without it `op` is a constant.
    """
    rules = _AxisRules(op, function, batched)
    op.py_kernels.pop(DispatchKey.Autograd, None)
    op.py_impl(DispatchKey.Autograd)(rules.run_autograd)
    op.py_impl(TransformType.Grad)(rules.run_level)
    op.py_impl(TransformType.Jvp)(rules.run_level)
    op.py_impl(TransformType.Vmap)(rules.map_level)


@dataclass(frozen=True)
class _AxisRules:
    """The rules of one operator; the arguments are those of `register_axis_rules`."""

    op: HigherOrderOperator
    function: type[torch.autograd.Function] | None
    batched: Callable[..., tuple[torch.Tensor, int | None]]

    def _differentiate(self, run: Callable[..., Any], params: Any, tensors: Any) -> Any:
        if self.function is None:
            return run(*tensors)
        with enable_single_level_autograd_function():
            return direct_apply(self.function)(run, self.op, params, *tensors)

    def run_autograd(self, *tensors: torch.Tensor, **params: Any) -> Any:
        below = _below_autograd()

        def run(*tensors: torch.Tensor) -> Any:
            with below():
                return dispatch_call(self.op, *tensors, **params)

        records = torch.is_grad_enabled()
        if in_dual_level() or (records and any(t.requires_grad for t in tensors)):
            return self._differentiate(run, params, tensors)
        return run(*tensors)

    def run_level(self, interpreter: Any, *tensors: torch.Tensor, **params: Any) -> Any:
        level = interpreter.level()

        def run(*tensors: torch.Tensor) -> Any:
            inner = [_unwrap_for_grad(t, level) for t in tensors]
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), interpreter.lower():
                output = dispatch_call(self.op, *inner, **params)
            return _wrap_for_grad(output, level)

        return self._differentiate(run, params, tensors)

    def map_level(self, interpreter: Any, *tensors: torch.Tensor, **params: Any) -> Any:
        level = interpreter.level()
        pairs = [unwrap_batched_tensor(t, level) for t in tensors]
        with interpreter.lower():
            output, dim = self.batched(level, interpreter.batch_size(), *pairs, **params)
        return output if dim is None else add_batch_dim(output, dim, level)


def _below_autograd() -> Callable[[], AbstractContextManager[None]]:
    """A context beneath autograd, with both modes of differentiation on or off as they are now.

    `autograd.Function.apply` switches both off. Outer levels of `torch.func` need them, and traces
    note them.
    """
    records, pushes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()

    @contextmanager
    def enter() -> Iterator[None]:
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.set_grad_enabled(records),
            forward_ad._set_fwd_grad_enabled(pushes),
        ):
            yield

    return enter


def find_unmapped_composites() -> list[OpOverload]:
    """List the composite operators of lists of tensors that PyTorch's `vmap` refuses.

    It has no rule for them, and runs in a loop only operators of single tensors.
    """
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not _has_kernel(name, "CompositeImplicitAutograd"):
            continue
        if any(_has_kernel(name, key) for key in _BATCHED):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if op is not None and not op._schema.is_mutable and _takes_and_gives_tensors(op):
            found.append(op)
    return found


_BATCHED = ("FuncTorchBatched", "FuncTorchBatchedDecomposition")
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def _takes_and_gives_tensors(op: OpOverload) -> bool:
    takes = any(str(a.type) == "List[Tensor]" for a in op._schema.arguments)
    gives = all("Tensor" in str(r.type) for r in op._schema.returns)
    return takes and gives and bool(op._schema.returns)


def register_function(
    op: OpOverload,
    function: type[torch.autograd.Function],
    push: Callable[[list[Any], list[torch.Tensor | None]], Sequence[torch.Tensor]] | None = None,
) -> None:
    """Give a custom operator the derivatives of `function`, under autograd and `torch.func` alike.

    `function.apply` takes, before the arguments of `op`, a function that runs `op` beneath
    autograd. Lists among the arguments are flattened, and a list of results is a tuple. It needs
    `setup_context`, and `jvp` for tangents. The rules of `torch.library.register_autograd` raise
    under `torch.func.grad` and give tangents of zero. Each level of `torch.func` calls it on
    tensors of its own, so that no rule for levels is needed. `jvp` is for linear operators, or
    linear in pieces: PyTorch runs it without forward mode. So forward over forward misses the part
    of a coefficient in it that depends on an input. For others there is `push`, of the arguments
    and their tangents, made of operators that have derivatives themselves.
    """
    rules = _FunctionRules(op, direct_apply(function), push)
    namespace, name = op.name().partition(".")[0].split("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)  # its registrations last as long as it does
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl(name, rules.run_autograd, "Autograd", allow_override=True)


@dataclass(frozen=True)
class _FunctionRules:
    """The derivatives of one custom operator; the arguments are those of `register_function`."""

    op: OpOverload
    apply: Callable[..., Any]
    push: Callable[[list[Any], list[torch.Tensor | None]], Sequence[torch.Tensor]] | None

    @cached_property
    def _returns_list(self) -> bool:
        return isinstance(self.op._schema.returns[0].type, torch.ListType)

    @cached_property
    def _takes_list(self) -> bool:
        return any(isinstance(a.type, torch.ListType) for a in self.op._schema.arguments)

    def run_autograd(self, *args: Any) -> Any:
        spec = None
        if self._takes_list:
            args, spec = tree_flatten(args)  # type: ignore[assignment]
        below = _below_autograd()

        def run(*args: Any) -> Any:
            with below():
                result = self.op(*(args if spec is None else tree_unflatten(args, spec)))
                return tuple(result) if self._returns_list else result

        result = self._differentiate(run, args)
        return list(result) if self._returns_list else result

    def _differentiate(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        tensors = (a for a in args if isinstance(a, torch.Tensor))
        if self.push is not None and in_dual_level() and has_tangents(list(tensors)):
            return _push_forward(lambda *args: self._record(run, args), self.push, args)
        if self.push is None and in_dual_level():
            with enable_single_level_autograd_function():
                return self.apply(run, *args)
        return self._record(run, args)

    def _record(self, run: Callable[..., Any], args: Sequence[Any]) -> Any:
        if torch.is_grad_enabled() and any(getattr(a, "requires_grad", False) for a in args):
            with enable_single_level_autograd_function():
                return self.apply(run, *args)
        return run(*args)


def _push_forward(record: Callable[..., Any], push: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The results of an operator as dual numbers; the backward finds its inputs as such too."""
    with forward_ad._set_fwd_grad_enabled(False):
        outputs = record(*args)
    pairs = [forward_ad.unpack_dual(a) if isinstance(a, torch.Tensor) else (a, None) for a in args]
    tangents = push(*map(list, zip(*pairs, strict=True)))
    return tuple(forward_ad.make_dual(x, t) for x, t in zip(outputs, tangents, strict=True))


_libraries: list[torch.library.Library] = []


def _as_proxy(value: Any, tracer: Any) -> Any:
    if isinstance(value, torch.Tensor):
        slot = get_proxy_slot(value, tracer, None)
        return value if slot is None else slot.proxy
    if isinstance(value, torch.nn.Module):
        name = tracer.get_fresh_qualname("body_")
        tracer.root.register_module(name, value)
        return tracer.create_proxy("get_attr", name, (), {})
    return value
