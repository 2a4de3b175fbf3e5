"""Levels of `torch.func`: which are active, what they wrap, rules of operators at the innermost."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import DispatchKey
from torch._C._functorch import TransformType as TransformType
from torch._C._functorch import (
    _add_batch_dim,
    _unwrap_batched,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_get_level,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
    unwrap_if_dead,
)
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import restore_vmap as restore_vmap
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def differentiates() -> bool:
    """Whether any active `torch.func` level is reverse-mode differentiation."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == TransformType.Grad for interpreter in stack)


def transform_depth() -> int:
    """How many levels of `torch.func` are active: the number of the innermost."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def innermost_transform() -> TransformType | None:
    stack = torch._C._functorch.get_interpreter_stack()
    return stack[-1].key() if stack else None


def requires_grad_at_any_level(tensor: torch.Tensor) -> bool:
    while True:
        if tensor.requires_grad:
            return True
        if not is_functorch_wrapped_tensor(tensor):
            return False
        tensor = get_unwrapped(tensor)


def is_of_level_above(tensor: torch.Tensor, depth: int) -> bool:
    """Whether `tensor` is wrapped by a level of `torch.func` with a greater number than `depth`."""
    return is_functorch_wrapped_tensor(tensor) and maybe_get_level(tensor) > depth


def innermost_tensor(tensor: torch.Tensor) -> torch.Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_mapped_at(tensor: torch.Tensor, level: int) -> bool:
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor) and maybe_get_level(tensor) == level:
            return True
        tensor = get_unwrapped(tensor)
    return False


add_batch_dim: Callable[[torch.Tensor, int, int], torch.Tensor] = _add_batch_dim
"""Makes a tensor whose dimension (2nd argument) `torch.vmap` at a level (3rd) maps over."""

unwrap_batched_tensor: Callable[[torch.Tensor, int], tuple[torch.Tensor, int | None]]
unwrap_batched_tensor = _unwrap_batched
"""Returns what `torch.vmap` at a level maps over, and the dimension; `None` if it does not."""


def offset_of(tensor: torch.Tensor) -> int:
    """Where `tensor` begins in its storage; 0 for one that a level of `torch.func` wraps."""
    if is_functorch_wrapped_tensor(tensor):
        return 0
    return tensor.storage_offset()  # type: ignore[return-value]


def push_forward_at_current_level(
    rule: Callable[[list[torch.Tensor], list[torch.Tensor | None]], tuple[Any, Any]],
    inputs: Sequence[torch.Tensor],
) -> tuple[Any, ...]:
    """Apply the rule of an operator for the innermost level, a `torch.func.jvp`.

    `rule` takes primals and tangents as the levels below see them, and gives outputs and their
    tangents.
    """
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    primals, tangents = [], []
    for tensor in inputs:
        tangent = forward_ad.unpack_dual(tensor).tangent
        primals.append(_unwrap_for_grad(tensor, level))
        tangents.append(None if tangent is None else _unwrap_for_grad(tangent, level))
    with _lower(interpreter):
        outputs, out_tangents = rule(primals, tangents)
    wrapped = []
    for output, tangent in zip(outputs, out_tangents, strict=True):
        outer = _wrap_for_grad(output, level)
        if tangent is not None:
            outer = _make_dual(outer, _wrap_for_grad(tangent, level))
        wrapped.append(outer)
    return tuple(wrapped)


def push_dual_numbers_forward(
    rule: Callable[[list[torch.Tensor], list[torch.Tensor | None]], tuple[Any, Any]],
    inputs: Sequence[torch.Tensor],
) -> tuple[Any, ...]:
    """Apply the rule of an operator to the dual numbers of a `forward_ad.dual_level`."""
    tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in inputs]
    primals = [
        tensor if tangent is None else forward_ad.unpack_dual(tensor).primal
        for tensor, tangent in zip(inputs, tangents, strict=True)
    ]
    return tuple(
        output if tangent is None else _make_dual(output, tangent)
        for output, tangent in zip(*rule(primals, tangents), strict=True)
    )


def _make_dual(primal: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """A dual number. Of an expanded primal a copy is one, if its tangent is laid out otherwise.

    PyTorch copies such a tangent into the strides of the primal, which then overlap.
    """
    if primal.layout is torch.strided and primal.stride() != tangent.stride():
        strides = zip(primal.shape, primal.stride(), strict=True)
        if any(size > 1 and not stride for size, stride in strides):
            primal = primal.clone(memory_format=torch.contiguous_format)
    dual: torch.Tensor = forward_ad.make_dual(primal, tangent)
    return dual


def has_tangents(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of `tensors` is a dual number, of a `forward_ad.dual_level`."""
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


class _AtLevel(_SingleLevelFunction):
    """The node that a level of `torch.func.grad` records, in `record_at_current_level`."""

    @staticmethod
    def forward(ctx: Any, interpreter: Any, records: bool, rule: Any, *inputs: Any) -> Any:
        level = interpreter.level()

        @contextmanager
        def lower() -> Iterator[None]:
            with torch.set_grad_enabled(records), interpreter.lower():
                yield

        inner = [_unwrap_for_grad(tensor, level) for tensor in inputs]
        # outer levels need what the call of an autograd function switches off
        with forward_ad._set_fwd_grad_enabled(True):
            outputs, residuals, ctx.pull = rule(inner, ctx.needs_input_grad[3:], lower)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*residuals)
        wrapped = [_wrap_for_grad(_unwrap_for_grad(output, level), level) for output in outputs]
        discrete = (t for t in wrapped if not (t.is_floating_point() or t.is_complex()))
        ctx.mark_non_differentiable(*discrete)
        return tuple(wrapped)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return (None, None, None, *ctx.pull(ctx.saved_tensors, cotangents))


RecordRule = Callable[
    [list[torch.Tensor], Sequence[bool], Callable[[], AbstractContextManager[None]]],
    tuple[Any, Any, Any],
]
"""Takes inputs as lower levels see them, which of them are differentiated, and a context in which
operators run in the levels below. Gives outputs, tensors to keep, and a function from those and
cotangents to cotangents of the inputs."""


def record_at_current_level(
    rule: RecordRule, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Apply the rule of an operator for the innermost level, a `torch.func.grad` or `vjp`."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    lifted, _ = interpreter.lift(tuple(inputs), {})  # or they might require a gradient elsewhere
    with enable_single_level_autograd_function():
        return _AtLevel.apply(interpreter, torch.is_grad_enabled(), rule, *lifted)  # type: ignore[attr-defined,no-any-return]


def leaf_at_current_level(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a new starting point of what the innermost level, a `grad`, records."""
    level = retrieve_current_functorch_interpreter().level()
    with eager_transforms.enable_inplace_requires_grad(True):
        return _wrap_for_grad(_unwrap_for_grad(tensor, level), level).requires_grad_()


def wrap_at_current_level(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as the innermost level, a `grad` or `jvp`, sees arguments: it may write to them."""
    return _wrap_for_grad(tensor, transform_depth())


def map_at_current_level(
    rule: Callable[[Sequence[torch.Tensor], Any, int, str], tuple[Any, Any]],
    inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Apply the rule of an operator for the innermost level, a `torch.func.vmap`.

    `rule` takes the tensors of all examples, where the axis is in each, its size, and the
    randomness. It gives outputs and where the axis is in each.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    pairs = [unwrap_batched_tensor(tensor, level) for tensor in inputs]
    inner, in_dims = zip(*pairs, strict=True) if pairs else ((), ())
    with interpreter.lower():
        outputs, out_dims = rule(inner, in_dims, interpreter.batch_size(), interpreter.randomness())
    return tuple(
        output if dim is None else add_batch_dim(output, dim, level)
        for output, dim in zip(outputs, out_dims, strict=True)
    )


class _Lowered(threading.local):
    def __init__(self) -> None:
        self.layers: list[tuple[int, Any]] = []


_lowered_layers = _Lowered()


@contextmanager
def _lower(interpreter: Any) -> Iterator[None]:
    """`interpreter.lower()` for a `torch.func.jvp`, whose tangents `without_level` reads."""
    level = interpreter.level()
    with ExitStack() as stack:
        if not interpreter.prev_fwd_grad_mode():
            stack.enter_context(forward_ad._set_fwd_grad_enabled(False))
        layer = pop_dynamic_layer_stack()
        stack.callback(push_dynamic_layer_stack, layer)
        _lowered_layers.layers.append((level, layer))
        stack.callback(_lowered_layers.layers.pop)
        yield


def without_level(tensor: torch.Tensor, level: int) -> tuple[torch.Tensor, bool]:
    """`tensor` as the levels of `torch.func` below `level`, which differentiates, see it.

    And whether that level, which has been lowered, differentiates with respect to it.
    """
    if not is_gradtrackingtensor(tensor) or maybe_get_level(tensor) != level:
        return tensor, False
    varies = tensor.requires_grad
    lowered = dict(_lowered_layers.layers).get(level)
    if not varies and lowered is not None:
        above = [pop_dynamic_layer_stack() for _ in range(transform_depth() - level + 1)]
        push_dynamic_layer_stack(lowered)
        try:
            varies = forward_ad.unpack_dual(tensor).tangent is not None
        finally:
            pop_dynamic_layer_stack()
            for layer in reversed(above):
                push_dynamic_layer_stack(layer)
    return get_unwrapped(tensor), varies


def without_batch(tensor: torch.Tensor, level: int) -> tuple[torch.Tensor, int | None]:
    """`tensor` without the axis that a `torch.func.vmap` at `level` maps over, and where it was."""
    if not is_batchedtensor(tensor) or maybe_get_level(tensor) != level:
        return tensor, None
    return unwrap_batched_tensor(tensor, level)


def apply_to_functional(
    function: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor]
) -> Any:
    interpreter: Any = retrieve_current_functorch_interpreter()
    context = FunctorchFunctionalizeAPI(interpreter)
    with context.redispatch_to_next():
        result = function(tuple(context.unwrap_tensors(tuple(inputs))))
    return context.wrap_tensors(result)


def without_dead_levels(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without the wrapper of a level of `torch.func` that has ended.

    PyTorch's own operators take it off by themselves.
    """
    return unwrap_if_dead(tensor)


def unwrap_dead_wrappers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply `without_dead_levels` to the tensors among `values`."""
    return tuple(unwrap_if_dead(v) if isinstance(v, torch.Tensor) else v for v in values)


# --- inside of a batching rule -------------------------------------------------------------------


@dataclass(frozen=True)
class VmapLevel:
    number: int
    size: int


@contextmanager
def at_level_below() -> Iterator[VmapLevel]:
    """In a batching rule: what runs in the block runs below its level, which is yielded."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set().add(DispatchKey.FuncTorchBatched)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield VmapLevel(interpreter.level(), interpreter.batch_size())


def asks_for_value(error: RuntimeError) -> bool:
    """Whether `error` is that of `vmap` where Python asks for the value of a mapped tensor."""
    return "It looks like you're calling .item() on a Tensor" in str(error)


def needs_mapped_value(error: RuntimeError) -> bool:
    """Whether `error` says that Python, or the size of a result, depends on a mapped tensor."""
    return any(text in str(error) for text in _NEEDS_MAPPED_VALUE)


_NEEDS_MAPPED_VALUE = (
    "vmap: It looks like you're",
    "vmap: We do not support batching operators that can",  # nonzero, a mask as an index
    "Cannot access data pointer of Tensor that doesn't have storage",  # tolist, numpy
)

LOOP_WARNING = "There is a performance drop because we have not yet implemented"
"""How the warning begins that PyTorch gives where it maps an operator by a loop."""


def dispatch_restored() -> AbstractContextManager[None]:
    """After the block the dispatcher's state is as before it.

    An error inside of several levels of `torch.func` leaves PyTorch 2.13 in another state, once
    Python frees the error: catch it inside the block.
    """
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def find_unmapped_operator(error: RuntimeError) -> str | None:
    """The name of the operator that `vmap` cannot map, if `error` says that there is one."""
    for pattern in _HAS_NO_RULE:
        found = re.search(pattern, str(error))
        if found is not None:
            return found.group(1)
    return None


_HAS_NO_RULE = (
    r"Batching rule not implemented for ([\w:.]+?)[.;]",
    r"Error: ([\w:.]+) requires special handling, and does not yet have a batching rule",
)


def find_looped_operator(warning: str) -> str | None:
    if not warning.startswith(LOOP_WARNING):
        return None
    return warning.partition("batching rule for ")[2].partition(" ")[0].rstrip(".")
