"""Functions of flat tensors that bring their own derivative, and what `vmap` makes of them.

A rule knows nothing of the levels of `torch.func` around it. `rule_dispatch.py` applies it level by
level, on tensors as the levels below see them. Mapped over an axis, a rule is another rule:

    y_i = f(x_i, w)         x: mapped, w: shared by all examples
    bwd:                    dx_i = dy_i df/dx_i,    dw = sum_i dy_i df/dw
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchremat import _torch
from torchremat.core.trees import scatter_values
from torchremat.derivatives.linear_parts import Tensors, depends_only_on, note_linear_part
from torchremat.errors import ForwardModeError
from torchremat.tracing.axes.mapped_functions import run_mapped
from torchremat.tracing.axes.named_axes import AxisName
from torchremat.tracing.capture import map_arguments

Cotangents = Sequence[Tensor | None]
Dims = tuple[int | None, ...]
Pushed = tuple[list[Tensor], list[Tensor | None]]
"""Outputs and their tangents, `None` for zero."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The outputs of a function that is differentiated, its residuals and its derivative.

    `pull(residuals, cotangents)` gives the cotangents of the inputs, `None` for zero. It
    `holds_more` if it refers to tensors that are not among `residuals`.
    """

    outputs: list[Tensor]
    residuals: list[Tensor]
    pull: Callable[[Tensors, Cotangents], list[Tensor | None]]
    holds_more: bool = False


@dataclass(frozen=True)
class RuleAxis:
    """An axis that a rule is mapped over, and where it is in each input."""

    in_dims: Dims
    size: int
    randomness: str
    name: AxisName = None
    level: int = 0
    """The level of `torch.func` that maps over it where the function is called."""
    remove_level: Callable[[Tensor, int], Tensor] = lambda tensor, _: tensor
    """Gives a tensor that a function closes over as the levels below a level see it."""

    def run(self, function: Callable[..., Any], dims: Dims, values: Tensors) -> tuple[Any, Dims]:
        """Map `function`: outputs, and where the axis is in each, `None` if they do not vary."""

        def run_at_level(*inputs: Tensor) -> Any:
            now = _torch.transform_depth()
            if now == self.level:
                return function(*inputs)
            with _MappedClosures(self, now) as closures:
                results = function(*inputs)
            return tuple(map(closures.bring_here, results))

        outputs, found = run_mapped(run_at_level, dims, self.size, self.randomness, self.name)(
            *values
        )
        return outputs, tuple(found)


class _MappedClosures(TorchFunctionMode):
    """Tensors that a function closes over are mapped by the level that runs it.

    They were mapped by the level of its call. Levels between the two have been removed since, so
    that the number of the level has changed to `now`.
    """

    def __init__(self, axis: RuleAxis, now: int) -> None:
        super().__init__()
        self.axis = axis
        self.now = now

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _torch.transform_depth() >= self.axis.level:
            return func(*args, **kwargs)
        return func(*map_arguments(self.bring_here, args), **map_arguments(self.bring_here, kwargs))

    def bring_here(self, tensor: Tensor) -> Tensor:
        """Put the axis of `tensor` at the level that runs, and take off the removed levels."""
        value, dim = _torch.without_batch(tensor, self.axis.level)
        depth = _torch.transform_depth()
        # a level that the function has opened has the number of a removed one; that of the axis too
        first = self.now if depth == self.now else depth + 1
        for level in reversed(range(first, self.axis.level)):
            value = self.axis.remove_level(value, level)
        return value if dim is None else _torch.add_batch_dim(value, dim, self.now)


@dataclass(eq=False, repr=False)
class FlatRule(ABC):
    """A function of tensors with a derivative of its own."""

    records_at_level: ClassVar[bool] = False
    """Whether `record` runs in the level of `torch.func` that differentiates, not below it."""
    out_dims: Dims = field(default=(), init=False)
    """After a run of a mapped rule, where the axis is in each output."""

    name: str
    primal: Callable[[Tensors], list[Tensor]]
    """The function where nothing is differentiated."""

    @abstractmethod
    def record(self, inputs: Tensors, perturbed: Sequence[bool]) -> Recorded:
        """Run the function, whose `perturbed` inputs are differentiated in reverse mode.

        It runs below the level that differentiates, unless it `records_at_level`.
        """

    def push(self, primals: Tensors, tangents: Cotangents) -> Pushed:
        """Compute outputs and tangents of the outputs, `None` for zero."""
        if all(tangent is None for tangent in tangents):
            outputs = self.primal(primals)
            return outputs, [None] * len(outputs)
        return self._push(primals, tangents)

    @abstractmethod
    def _push(self, primals: Tensors, tangents: Cotangents) -> Pushed: ...

    @abstractmethod
    def map_over(self, axis: RuleAxis) -> "FlatRule":
        """Make the rule of the function mapped over an axis."""

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class _RuleOverAxis:
    """The functions of a rule, mapped. `rule` is made of them, and notes its `out_dims`."""

    of: Any
    axis: RuleAxis
    rule: FlatRule = field(init=False)

    def primal(self, inputs: Tensors) -> list[Tensor]:
        def function(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.of.primal(values))

        outputs, self.rule.out_dims = self.axis.run(function, self.axis.in_dims, inputs)
        return list(outputs)


# --- a rule for reverse mode ----------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class VjpRule(FlatRule):
    """A function with forward and backward rules.

    outputs, residuals, rest = fwd(inputs, perturbed)       rest: any Python value
    cotangents of inputs = bwd(rest, residuals, cotangents)
    """

    fwd: Callable[[Tensors, Sequence[bool]], tuple[list[Tensor], list[Tensor], Any]]
    bwd: Callable[[Any, Tensors, Cotangents], list[Tensor | None]]

    def record(self, inputs: Tensors, perturbed: Sequence[bool]) -> Recorded:
        outputs, residuals, rest = self.fwd(inputs, perturbed)
        return Recorded(outputs, residuals, partial(self._pull, rest))

    def _pull(self, rest: Any, residuals: Tensors, cotangents: Cotangents) -> list[Tensor | None]:
        # autograd's gradients are the conjugates of cotangents
        found = self.bwd(rest, residuals, [_conjugate(ct) for ct in cotangents])
        return [_conjugate(gradient) for gradient in found]

    def _push(self, primals: Tensors, tangents: Cotangents) -> Pushed:
        raise ForwardModeError(
            "can't apply forward-mode differentiation (jvp) to a custom_vjp function. "
            f"{self.name} has only a rule for reverse mode: give it one for forward mode, from "
            "which reverse mode follows, with custom_jvp."
        )

    def map_over(self, axis: RuleAxis) -> "VjpRule":
        over = _VjpOverAxis(self, axis)
        over.rule = rule = VjpRule(self.name, over.primal, over.fwd, over.bwd)
        return rule


@dataclass(eq=False)
class _VjpOverAxis(_RuleOverAxis):
    of: VjpRule

    def fwd(
        self, inputs: Tensors, perturbed: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor], Any]:
        rest: list[Any] = []

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            outputs, residuals, inner = self.of.fwd(values, perturbed)
            rest[:] = [inner, len(outputs)]
            return (*outputs, *residuals)

        results, dims = self.axis.run(function, self.axis.in_dims, inputs)
        inner, count = rest
        self.rule.out_dims = dims[:count]
        return list(results[:count]), list(results[count:]), (inner, dims[:count], dims[count:])

    def bwd(self, rest: Any, residuals: Tensors, cotangents: Cotangents) -> list[Tensor | None]:
        inner, out_dims, residual_dims = rest
        given = [i for i, ct in enumerate(cotangents) if ct is not None]
        found: list[int] = []

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            count = len(residuals)
            cts = scatter_values(values[count:], given, len(cotangents))
            gradients = self.of.bwd(inner, values[:count], cts)
            found[:] = [i for i, g in enumerate(gradients) if g is not None]
            return tuple(g for g in gradients if g is not None)

        values, dims = list(residuals), [*residual_dims]
        for dim, ct in zip(out_dims, cotangents, strict=True):
            if ct is not None:
                values.append(self._give_to_first(ct) if dim is None else ct)
                dims.append(dim or 0)
        gradients, at = self.axis.run(function, tuple(dims), values)
        in_dims = [self.axis.in_dims[i] for i in found]
        placed = [
            self._like_input(g, dim, in_dim)
            for g, dim, in_dim in zip(gradients, at, in_dims, strict=True)
        ]
        return scatter_values(placed, found, len(self.axis.in_dims))

    def _give_to_first(self, cotangent: Tensor) -> Tensor:
        """The cotangent of an output that all examples share, for the first of them.

        Each example computes that output, but it is there once: gradients of shared inputs, which
        are summed over the examples, would count its cotangent as often.
        """
        others = cotangent.new_zeros((max(self.axis.size - 1, 0), *cotangent.shape))
        return torch.cat([cotangent.unsqueeze(0), others])[: self.axis.size]

    def _like_input(self, gradient: Tensor, dim: int | None, in_dim: int | None) -> Tensor:
        """Put the axis where the input has it; sum over it if the input has none."""
        if in_dim is None:
            return gradient if dim is None else gradient.sum(dim)
        return place_axis(gradient, dim, in_dim, self.axis.size)


# --- a rule for forward mode ----------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class JvpRule(FlatRule):
    """A function with a rule for tangents, which is transposed in reverse mode.

    y, dy = jvp(x, dx),  dy = J dx:     ct_x = ct_y J
    """

    records_at_level = True

    jvp: Callable[[Tensors, Cotangents], Pushed]

    def _push(self, primals: Tensors, tangents: Cotangents) -> Pushed:
        return self.jvp(primals, tangents)

    def record(self, inputs: Tensors, perturbed: Sequence[bool]) -> Recorded:
        """Run the rule on tangents of zero, and differentiate it with respect to these.

        The rule is linear in them, so that its derivative anywhere is the rule. To that what
        depends on the primals alone is a constant. Inside of a level of `torch.func`, that level
        differentiates.
        """
        wrt = [i for i, chosen in enumerate(perturbed) if chosen]
        is_level = _torch.innermost_transform() == _torch.TransformType.Grad
        with torch.enable_grad():
            zeros = [_zeros_like(inputs[i]) for i in wrt]
            leaves = [
                _torch.leaf_at_current_level(zero) if is_level else zero.requires_grad_()
                for zero in zeros
            ]
            with note_linear_part(leaves, inputs):
                outputs, found = self.jvp(inputs, scatter_values(leaves, wrt, len(inputs)))
        if is_level:
            outputs = [x.detach() if depends_only_on(x, leaves) else x for x in outputs]

        def pull(_: Tensors, cotangents: Cotangents) -> list[Tensor | None]:
            return scatter_values(_transpose_rule(leaves, found, cotangents), wrt, len(inputs))

        return Recorded(outputs, [], pull, holds_more=True)

    def map_over(self, axis: RuleAxis) -> "JvpRule":
        over = _JvpOverAxis(self, axis)
        over.rule = rule = JvpRule(self.name, over.primal, over.push)
        return rule


def _transpose_rule(
    leaves: Tensors, tangents: Cotangents, cotangents: Cotangents
) -> Sequence[Tensor | None]:
    """Compute the cotangents of `leaves`, of which `tangents` are a linear function."""
    pairs = [
        (tangent, ct)
        for tangent, ct in zip(tangents, cotangents, strict=True)
        if tangent is not None and ct is not None and tangent.requires_grad
    ]
    if not pairs:
        return [None] * len(leaves)
    return torch.autograd.grad(
        [tangent for tangent, _ in pairs],
        list(leaves),
        [ct for _, ct in pairs],
        retain_graph=True,
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )


@dataclass(eq=False)
class _JvpOverAxis(_RuleOverAxis):
    of: JvpRule

    def push(self, primals: Tensors, tangents: Cotangents) -> Pushed:
        given = [i for i, t in enumerate(tangents) if t is not None]
        nonzero: list[int] = []
        count = len(primals)

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            outputs, found = self.of.jvp(
                values[:count], scatter_values(values[count:], given, len(tangents))
            )
            nonzero[:] = [i for i, t in enumerate(found) if t is not None]
            return (*outputs, *(t for t in found if t is not None))

        in_dims = self.axis.in_dims
        dims = (*in_dims, *(in_dims[i] for i in given))
        values = [*primals, *(t for t in tangents if t is not None)]
        results, at = self.axis.run(function, dims, values)
        num_outputs = len(results) - len(nonzero)
        return self._align_axes(results, at, nonzero, num_outputs)

    def _align_axes(
        self, results: Tensors, at: Dims, nonzero: Sequence[int], num_outputs: int
    ) -> Pushed:
        tangents = scatter_values(results[num_outputs:], nonzero, num_outputs)
        tangent_dims = scatter_values(at[num_outputs:], nonzero, num_outputs)
        out_dims = [
            d if d is not None else t for d, t in zip(at[:num_outputs], tangent_dims, strict=True)
        ]
        self.rule.out_dims = tuple(out_dims)
        size = self.axis.size
        outputs = [
            place_axis(output, dim, to, size)
            for output, dim, to in zip(results, at, out_dims, strict=False)
        ]
        moved = [
            None if t is None else place_axis(t, dim, to, size)
            for t, dim, to in zip(tangents, tangent_dims, out_dims, strict=True)
        ]
        return outputs, moved


# --- shared by both ------------------------------------------------------------------------------


def place_axis(tensor: Tensor, dim: int | None, to: int | None, size: int) -> Tensor:
    """Move the axis of `tensor` from `dim` to `to`; repeat it along a new one if it has none."""
    if to is None or dim == to:
        return tensor
    if dim is not None:
        return tensor.movedim(dim, to)
    shape = list(tensor.shape)
    shape.insert(to, size)
    return tensor.unsqueeze(to).expand(shape)


def is_inexact(value: Any) -> bool:
    """Whether it is a tensor of floating-point or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _zeros_like(tensor: Tensor) -> Tensor:
    """Make zeros that take the memory of one number."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _conjugate(tensor: Tensor | None) -> Tensor | None:
    return tensor.conj().resolve_conj() if tensor is not None and tensor.is_complex() else tensor
