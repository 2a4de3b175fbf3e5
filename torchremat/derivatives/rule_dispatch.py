"""Calls of functions with rules of their own, under each level of `torch.func` and plain autograd.

The innermost level takes its rule, and runs it as plain code in the levels below: there what the
rule computes is differentiated and mapped like anything else. As in JAX, so that a derivative of a
derivative needs no rule for the rule.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchremat import _torch
from torchremat.derivatives.linear_parts import is_in_linear_part
from torchremat.derivatives.rules import (
    FlatRule,
    Recorded,
    RuleAxis,
    is_inexact,
)
from torchremat.errors import ClosureError
from torchremat.graph.notes import note
from torchremat.tracing.ambient_state import AmbientState
from torchremat.tracing.axes.named_axes import frame_being_mapped
from torchremat.tracing.capture import map_arguments
from torchremat.tracing.tracing import current_tracing, lift_all

uncompiled = _torch.out_of_compiler(
    "a custom_vjp or custom_jvp function runs outside of the compiler, with its rules"
)


class CustomCall(torch.autograd.Function):
    """A call of a function that has a rule: `apply(rule, *tensors)` gives its outputs.

    In a graph it is one `function_p`.
    """

    holds_rule_of_user = True

    @classmethod
    def apply(cls, rule: FlatRule, *inputs: Tensor) -> Any:
        """Apply the rule for the innermost level, or record a node of plain autograd."""
        if _torch.innermost_proxy_mode() is not None:
            inputs = tuple(lift_all(inputs))
        inputs = _torch.unwrap_dead_wrappers(inputs)
        kinds = _torch.TransformType
        level = _torch.innermost_transform()
        if rule.records_at_level and level in {None, kinds.Grad} and is_in_linear_part(inputs):
            return tuple(rule.primal(inputs))
        by_level = {kinds.Grad: _record, kinds.Jvp: _push, kinds.Vmap: _map}
        if level in by_level:
            return by_level[level](cls, rule, inputs)
        if level == kinds.Functionalize:
            return _torch.apply_to_functional(lambda inner: cls.apply(rule, *inner), inputs)
        if _torch.in_dual_level() and _torch.has_tangents(inputs):
            return _torch.push_dual_numbers_forward(rule.push, inputs)
        if _torch.innermost_proxy_mode() is None:
            if not torch.is_grad_enabled():
                return tuple(rule.primal(inputs))
            if not any(tensor.requires_grad for tensor in inputs):
                outputs = rule.primal(inputs)
                _refuse_closures(rule, outputs)
                return tuple(outputs)
        return super().apply(rule, *inputs)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, rule: FlatRule, *inputs: Tensor) -> tuple[Tensor, ...]:
        perturbed = ctx.needs_input_grad[1:]
        values = [tensor.detach() for tensor in inputs]
        tracing = current_tracing()
        records = tracing is None or tracing.grad_enabled
        num_nodes = 0 if tracing is None else len(tracing.graph.nodes)
        with torch.set_grad_enabled(records):
            if not any(perturbed):
                recorded = Recorded(rule.primal(values), [], lambda *_: [])
            else:
                recorded = rule.record(values, perturbed)
        if records:
            _refuse_closures(rule, [*recorded.outputs, *recorded.residuals])
        outputs = _copy_aliases(recorded.outputs, values)
        if any(perturbed):  # autograd writes its node into each: not into one that is closed over
            outputs = [t.view_as(t) if _torch.is_view(t) else t.detach() for t in outputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in outputs if not is_inexact(t)))
        if any(perturbed):
            _save(ctx, rule, recorded, inputs, values, outputs)
            if tracing is not None and ctx.reruns:
                for node in islice(tracing.graph.nodes, num_nodes, None):
                    note(node, is_rerun=True)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        count = ctx.num_residuals
        saved = ctx.saved_tensors  # saved-tensor hooks may refuse to unpack twice
        residuals, inputs = saved[:count], saved[count:]
        with _as_in_forward(ctx):
            if torch.is_grad_enabled() and ctx.reruns:
                recorded = ctx.rule.record(inputs, ctx.needs_input_grad[1:])
                return (None, *recorded.pull(recorded.residuals, cotangents))
            if ctx.pull is None:
                raise RuntimeError(
                    "Trying to backward through the graph a second time: what the rule of "
                    f"{ctx.rule.name} saved has been freed. Specify retain_graph=True for the first"
                )
            gradients = ctx.pull(residuals, cotangents)
        if ctx.reruns and not _torch.keeps_graph_after_backward():
            ctx.pull = None
        return (None, *gradients)


class CustomVjpCall(CustomCall):
    """A call of a `custom_vjp` function."""


class CustomJvpCall(CustomCall):
    """A call of a `custom_jvp` function."""


def _save(
    ctx: Any,
    rule: FlatRule,
    recorded: Recorded,
    inputs: Sequence[Tensor],
    values: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> None:
    """Save what the backward pass reads.

    A residual that is an input or output has a place in autograd's graph: a derivative of the
    backward pass flows through it. What flows through other residuals is found by running the rule
    again, which needs the inputs.
    """
    places = {id(v): t for v, t in zip(values, inputs, strict=True)}
    places |= {id(v): t for v, t in zip(recorded.outputs, outputs, strict=True)}
    fresh = [r for r in recorded.residuals if id(r) not in places]
    ctx.reruns = recorded.holds_more or any(map(is_inexact, fresh))
    ctx.rule, ctx.pull = rule, recorded.pull
    ctx.num_residuals = len(recorded.residuals)
    again = inputs if ctx.reruns else ()
    ctx.save_for_backward(*(places.get(id(r), r) for r in recorded.residuals), *again)
    ctx.state = AmbientState.now() if _torch.is_any_autocast_enabled() else None


@contextmanager
def _as_in_forward(ctx: Any) -> Iterator[None]:
    """Enter the autocast of the forward pass."""
    if ctx.state is None:
        yield
        return
    with ctx.state.restore():
        yield


def _copy_aliases(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Make a view of each output that is an input or another output.

    Autograd allows an output to be only one of these.
    """
    seen = set(map(id, inputs))
    result = []
    for output in outputs:
        result.append(output.view_as(output) if id(output) in seen else output)
        seen.add(id(output))
    return result


# --- the levels of torch.func ---------------------------------------------------------------------


def _record(cls: type[CustomCall], rule: FlatRule, inputs: Sequence[Tensor]) -> Any:
    """Differentiate at this level, if one of the inputs is differentiated here."""
    level = _torch.transform_depth()

    def record(inner: list[Tensor], perturbed: Sequence[bool], lower: Any) -> Any:
        if any(perturbed) and rule.records_at_level:
            recorded = rule.record(inner, perturbed)
            outputs = [_remove_level(rule, tensor, level) for tensor in recorded.outputs]
            with lower():
                return _copy_aliases(outputs, inner), recorded.residuals, recorded.pull
        with lower():  # levels below may differentiate what is computed here, views too
            with _ClosuresBelow(rule, level):
                if not any(perturbed):
                    return cls.apply(rule, *inner), [], lambda *_: [None] * len(inner)
                recorded = rule.record(inner, perturbed)
            return _copy_aliases(recorded.outputs, inner), recorded.residuals, recorded.pull

    return _torch.record_at_current_level(record, inputs)


def _push(_: type[CustomCall], rule: FlatRule, inputs: Sequence[Tensor]) -> Any:
    level = _torch.transform_depth()

    def push(primals: list[Tensor], tangents: list[Tensor | None]) -> Any:
        with _ClosuresBelow(rule, level):
            return rule.push(primals, tangents)

    return _torch.push_forward_at_current_level(push, inputs)


def _map(cls: type[CustomCall], rule: FlatRule, inputs: Sequence[Tensor]) -> Any:
    level = _torch.transform_depth()

    def apply(inner: Sequence[Tensor], in_dims: Any, size: int, randomness: str) -> Any:
        frame = frame_being_mapped()
        name = None if frame is None else frame.name
        remove = partial(_remove_level, rule)
        over_axis = rule.map_over(RuleAxis(tuple(in_dims), size, randomness, name, level, remove))
        return cls.apply(over_axis, *inner), over_axis.out_dims

    return _torch.map_at_current_level(apply, inputs)


# --- tensors that a function closes over ----------------------------------------------------------


class _ClosuresBelow(TorchFunctionMode):
    """Code of a rule runs below `level`: it sees closed-over tensors as the levels there do."""

    def __init__(self, rule: FlatRule, level: int) -> None:
        super().__init__()
        self.rule = rule
        self.level = level

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _torch.transform_depth() >= self.level:
            return func(*args, **kwargs)  # the code has opened levels of its own, of this number
        return func(
            *map_arguments(self._remove_level, args), **map_arguments(self._remove_level, kwargs)
        )

    def _remove_level(self, tensor: Tensor) -> Tensor:
        return _remove_level(self.rule, tensor, self.level)


def _remove_level(rule: FlatRule, tensor: Tensor, level: int) -> Tensor:
    """`tensor` as the levels below see it; raise if this level differentiates it."""
    below, varies = _torch.without_level(tensor, level)
    if varies:
        raise _make_closure_error(rule, tensor)
    return below


def _refuse_closures(rule: FlatRule, results: Sequence[Tensor]) -> None:
    """Raise if results have a gradient though no input has one."""
    for tensor in results:
        if tensor.requires_grad:
            raise _make_closure_error(rule, tensor)


def _make_closure_error(rule: FlatRule, tensor: Tensor) -> ClosureError:
    kind, rules = ("custom_jvp", "JVP") if hasattr(rule, "jvp") else ("custom_vjp", "VJP")
    return ClosureError(
        f"Detected differentiation of a {kind} function with respect to a closed-over value. That "
        f"isn't supported because the custom {rules} rule only specifies how to differentiate the "
        f"{kind} function with respect to explicit input parameters. {rule.name} closes over a "
        f"tensor that requires a gradient (a value of shape {tuple(tensor.shape)} depends on it), "
        "a parameter of a module say. Pass it as an argument; for a module, pass its parameters "
        "and call it through torch.func.functional_call. If it is to have no gradient, detach it."
    )
