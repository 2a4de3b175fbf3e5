"""The derivative of a loop: an `autograd.Function` whose backward pass is a function, too.

    LoopFunction    state, xs, shared                    ->  last state, stacked, snapshots
    LoopGradient    these, snapshots, cotangents         ->  gradients

Let u be a direction of the inputs, and J the Jacobian of a loop. The derivative of its gradient
`J.T ct` along u is the gradient of `ct . (J u)`. J u is what the loop of steps with tangents
computes. So both derivatives of `LoopGradient`, and the forward one of `LoopFunction`, are loops
again, of steps with tangents: they save few states, and have derivatives of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.loops.runs import LoopCall, Record, run_backward, run_forward
from torchremat.loops.step import StepLayout, Tensors, is_differentiable, pick
from torchremat.loops.transformed_steps import (
    DualStep,
    Flags,
    MappedStep,
    expand_all,
    map_step,
)


def run_loop(call: LoopCall, record: Record, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The last state, stacked results, and saved states."""
    return LoopFunction.apply(call, record, *inputs)  # type: ignore[no-untyped-call,no-any-return]


def run_gradient(call: LoopCall, record: Record, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The gradients of inputs, from inputs, saved states and cotangents."""
    return LoopGradient.apply(call, record, *tensors)  # type: ignore[no-untyped-call,no-any-return]


class LoopFunction(torch.autograd.Function):
    """`apply(call, record, *inputs)`: the last state, stacked results, and saved states."""

    @staticmethod
    def forward(call: LoopCall, record: Record, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_forward(call, record, inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.record, *tensors = inputs
        layout = ctx.call.layout
        snapshots = output[layout.state + layout.stacked :]
        constant = [t for t in output if not is_differentiable(t)]
        ctx.mark_non_differentiable(*snapshots, *constant)
        ctx.save_for_backward(*tensors, *snapshots)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        given = _Given(ctx.call, ctx.record, ctx.saved_tensors)
        flags = given.result_flags
        chosen = pick(cotangents[: len(flags)], flags)
        needed = given.with_wanted(ctx.needs_input_grad[2:])
        gradients = run_gradient(needed.call, ctx.record, *given.inputs, *given.snapshots, *chosen)
        return (None, None, *needed.place(gradients))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given = _Given(ctx.call, ctx.record, ctx.saved_tensors)
        dual = _Dual(given, tangents[2:])
        return (*dual.result_tangents(), *[None] * given.num_snapshots)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: LoopCall, record: Record, *inputs: Tensor) -> Any:
        tensors, flags = _move_batch(call.layout, inputs, in_dims[2:])
        step = _map_step(info, call, tensors, flags)
        states = step.flags[0]
        count = len(states)
        state = expand_all(tensors[:count], flags[:count], states, info.batch_size)
        outputs = run_loop(replace(call, step=step), record, *state, *tensors[count:])
        dims = [0 if flag else None for flag in states]
        stacked = [1] * call.layout.stacked
        return outputs, (*dims, *stacked, *(dims * len(record.positions)))


class LoopGradient(torch.autograd.Function):
    """`apply(call, record, *inputs, *snapshots, *cotangents)`: gradients of inputs.

    Cotangents are those of the results that may have one, gradients those of inputs that vary.
    """

    @staticmethod
    def forward(call: LoopCall, record: Record, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = _Given(call, record, tensors)
        return tuple(run_backward(call, record, given.inputs, given.snapshots, given.cotangents))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.record, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *directions: Any) -> Any:
        given = _Given(ctx.call, ctx.record, ctx.saved_tensors)
        dual = _Dual(given, given.place(directions))
        needed = given.with_wanted(ctx.needs_input_grad[2 : 2 + len(given.inputs)])
        zeros = [torch.zeros_like(ct) for ct in given.cotangents]
        gradients = dual.second_derivative(zeros, needed.call.varies(given.inputs))
        pushed = pick(dual.result_tangents(), given.result_flags)
        return (None, None, *needed.place(gradients), *[None] * len(given.snapshots), *pushed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given = _Given(ctx.call, ctx.record, ctx.saved_tensors)
        num_inputs, num_snapshots = len(given.inputs), len(given.snapshots)
        moved = tangents[2 + num_inputs + num_snapshots :]
        pairs = zip(given.cotangents, moved, strict=True)
        cotangents = [torch.zeros_like(ct) if t is None else t for ct, t in pairs]
        dual = _Dual(given, tangents[2 : 2 + num_inputs])
        return tuple(dual.second_derivative(cotangents, given.call.varies(given.inputs)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: LoopCall, record: Record, *tensors: Tensor) -> Any:
        """All is mapped: each element has gradients of its own, of what is shared, too."""
        layout = call.layout
        if record.saved is not None:  # the loop itself ran outside of this level
            first = layout.state + layout.slices + layout.shared
            saved = [t for states in record.saved for t in states]
            tensors = (*tensors[:first], *saved, *tensors[first:])
            in_dims = (*in_dims[: 2 + first], *[None] * len(saved), *in_dims[2 + first :])
            record = replace(record, saved=None)
        given, dims = _Given(call, record, tensors), _Given(call, record, in_dims[2:])
        moved, flags = _move_batch(layout, given.inputs, dims.inputs)
        everywhere = (True,) * len(flags)
        slices = range(layout.state, layout.state + layout.slices)
        inputs = [
            expand_all([t], (flag,), (True,), info.batch_size, int(i in slices))[0]
            for i, (t, flag) in enumerate(zip(moved, flags, strict=True))
        ]
        snapshots = _batch_first(info, given.snapshots, dims.snapshots)
        num_states = sum(map(is_differentiable, given.inputs[: layout.state]))
        cotangents = _batch_first(info, given.cotangents, dims.cotangents)
        cotangents[num_states:] = [t.movedim(0, 1) for t in cotangents[num_states:]]
        step = _map_step(info, call, inputs, everywhere)
        gradients = run_gradient(replace(call, step=step), record, *inputs, *snapshots, *cotangents)
        varies = call.varies(inputs)
        places = [int(i in slices) for i, flag in enumerate(varies) if flag]
        return gradients, tuple(places)


@dataclass(frozen=True, eq=False)
class _Given:
    """The tensors of a loop's derivative, by kind."""

    call: LoopCall
    record: Record
    tensors: Sequence[Any]

    @property
    def _num_inputs(self) -> int:
        layout = self.call.layout
        return layout.state + layout.slices + layout.shared

    @property
    def _num_first(self) -> int:
        return self._num_inputs + self.num_snapshots

    @property
    def num_snapshots(self) -> int:
        """How many tensors the saved states are, if they are not in the record."""
        has_own = self.record.saved is not None
        return 0 if has_own else len(self.record.positions) * self.call.layout.state

    @property
    def inputs(self) -> list[Any]:
        return list(self.tensors[: self._num_inputs])

    @property
    def snapshots(self) -> list[Any]:
        return list(self.tensors[self._num_inputs : self._num_first])

    @property
    def cotangents(self) -> list[Any]:
        return list(self.tensors[self._num_first :])

    @property
    def result_flags(self) -> Flags:
        """A flag of each result: whether it may have a gradient."""
        state = self.inputs[: self.call.layout.state]
        return (*map(is_differentiable, state), *self.record.stacks_gradients)

    def place(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients at the places of the inputs that vary, and `None` at others."""
        left = iter(gradients)
        return [next(left) if flag else None for flag in self.call.varies(self.inputs)]

    def with_wanted(self, needed: Sequence[bool]) -> "_Given":
        """These tensors, of which besides the state only those `needed` vary."""
        pairs = enumerate(zip(self.inputs, needed, strict=True))
        wanted = tuple(
            is_differentiable(t) and (flag or i < self.call.layout.state) for i, (t, flag) in pairs
        )
        return replace(self, call=replace(self.call, wanted=wanted))


class _Dual:
    """The loop with tangents: it has run, and `outputs` are its results.

    Args:
        tangents: of each input one, or `None`.
    """

    def __init__(self, given: _Given, tangents: Sequence[Any]) -> None:
        self.given = given
        layout = given.call.layout
        moving = given.with_wanted([t is not None for t in tangents])
        flags = tuple(map(tuple, layout.split(moving.call.varies(given.inputs))))
        moved = [
            torch.zeros_like(t) if tangent is None else tangent
            for t, tangent in zip(given.inputs, tangents, strict=True)
        ]
        groups = zip(layout.split(given.inputs), layout.split(moved), flags, strict=True)
        state, slices, shared = flags
        step = DualStep(given.call.step, (state, slices, shared, given.record.stacks_gradients))
        self.inputs = [t for g, m, f in groups for t in (*g, *pick(m, f))]
        self.flags = flags
        lends = _torch.functorch_is_active()
        self.call = replace(given.call, step=step, saves=True, lends=lends, wanted=None)
        self.record = Record()
        self.outputs = run_loop(self.call, self.record, *self.inputs)

    def result_tangents(self) -> list[Any]:
        """The tangents of all results of the plain loop, `None` for those without one."""
        layout, flags = self.given.call.layout, self.given.result_flags
        state, stacked = flags[: layout.state], flags[layout.state :]
        first = self.outputs[layout.state :]
        second = first[sum(state) + layout.stacked :]
        left = iter((*first[: sum(state)], *second))
        return [next(left) if flag else None for flag in (*state, *stacked)]

    def second_derivative(self, cotangents: Sequence[Tensor], wanted: Flags) -> Tensors:
        """The gradient of `cotangents . f + ct . (J u)`, of the inputs that are `wanted`."""
        given, layout = self.given, self.given.call.layout
        num_states = sum(given.result_flags[: layout.state])
        ours = given.cotangents
        all_cotangents = [
            *cotangents[:num_states], *ours[:num_states],
            *cotangents[num_states:], *ours[num_states:],
        ]  # fmt: skip
        snapshots = self.outputs[self.call.layout.state + self.call.layout.stacked :]
        call = replace(self.call, wanted=self._spread(wanted))
        gradients = run_gradient(call, self.record, *self.inputs, *snapshots, *all_cotangents)
        return [*gradients[:num_states], *gradients[2 * num_states :]]

    def _spread(self, wanted: Flags) -> Flags:
        """Of all inputs with tangents, those `wanted`, and of tangents only those of the state."""
        kinds = zip(self.given.call.layout.split(wanted), self.flags, strict=True)
        (state, moving), *others = kinds
        rest = (flag for some, has in others for flag in (*some, *[False] * sum(has)))
        return (*state, *[True] * sum(moving), *rest)


def _move_batch(
    layout: StepLayout, tensors: Sequence[Tensor], dims: Sequence[Any]
) -> tuple[Tensors, Flags]:
    """Inputs with the batch as their first dimension, slices as their second."""
    slices = range(layout.state, layout.state + layout.slices)
    moved = [
        t if dim is None else t.movedim(dim, int(i in slices))
        for i, (t, dim) in enumerate(zip(tensors, dims, strict=True))
    ]
    return moved, tuple(dim is not None for dim in dims)


def _batch_first(info: Any, tensors: Sequence[Tensor], dims: Sequence[Any]) -> Tensors:
    return [
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, dims, strict=True)
    ]


def _map_step(info: Any, call: LoopCall, tensors: Tensors, flags: Flags) -> MappedStep:
    state, slices, shared = call.layout.split(tensors)
    first = [t[0] for t in slices]
    kinds = call.layout.split(flags)
    return map_step(
        call.step,
        (state, first, shared),
        (tuple(kinds[0]), tuple(kinds[1]), tuple(kinds[2])),
        has_condition=call.length is None,
        randomness=info.randomness,
    )
