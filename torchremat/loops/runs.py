"""A loop, run forward and backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.accelerators import get_all_generator_states, set_all_generator_states
from torchremat.core.interrupts import let_interrupts_in
from torchremat.errors import EffectError
from torchremat.loops.captured import Found, NewInputError, find_stray_leaf
from torchremat.loops.snapshots import Snapshots, choose_next, num_snapshots
from torchremat.loops.step import Step, StepLayout, Tensors, is_differentiable, pick
from torchremat.report.live_bytes import LiveBytes
from torchremat.tracing.ambient_state import AmbientState
from torchremat.tracing.outer_arguments import handle_function_calls

ROOM_OF_STEPS = 1
"""How much room steps with derivatives have in the backward pass, to that of saved states."""

RandomStates = dict[torch.device, Tensor]


@dataclass(frozen=True, eq=False)
class LoopCall:
    """One call of a loop, but for its tensors.

    Attributes:
        length: the number of steps, if it is known; else the condition decides.
        is_reversed: whether the slices are read, and results stacked, from the last to the first.
        most: how many states are saved at most; `None` for two for each doubling of the steps.
        saves: whether any state is saved: not without a derivative.
        lends: whether saved states are results, for levels of `torch.func` to see. Else `Record`
            has them, and the backward pass frees them one by one.
        draws: whether steps draw random numbers, so that states of generators are saved, too.
        ambient: autocast and the like, for steps that run in the backward pass.
        found: tensors from outside that steps have read, and that are no inputs yet.
        wanted: which inputs have a derivative; without it, all that may. The state always has.
    """

    step: Step
    length: int | None
    is_reversed: bool
    most: int | None
    saves: bool
    lends: bool
    draws: bool
    ambient: AmbientState
    found: Found
    wanted: tuple[bool, ...] | None = None

    def varies(self, inputs: Sequence[Tensor]) -> tuple[bool, ...]:
        """A flag of each of `inputs`: whether it has a derivative."""
        able = map(is_differentiable, inputs)
        return tuple(able) if self.wanted is None else self.wanted

    @property
    def layout(self) -> StepLayout:
        return self.step.layout


@dataclass(eq=False)
class Record:
    """The notes of a run for its derivative, besides tensors.

    Attributes:
        positions: the steps before which a state was saved, without the first.
        saved: these states, unless the loop lends them.
        random_states: those of the generators at these positions and at 0.
        stacks_gradients: of each stacked result, whether it may have a gradient.
    """

    num_steps: int = 0
    positions: tuple[int, ...] = ()
    saved: list[Tensors] | None = None
    random_states: dict[int, RandomStates] = field(default_factory=dict)
    stacks_gradients: tuple[bool, ...] = ()


def run_forward(call: LoopCall, record: Record, inputs: Sequence[Tensor]) -> Tensors:
    """The last state, the stacked results, and the saved states, one after the other."""
    with handle_function_calls():
        return _run_forward(call, record, inputs)


def _run_forward(call: LoopCall, record: Record, inputs: Sequence[Tensor]) -> Tensors:
    state, slices, shared = call.layout.split(inputs)
    snapshots = Snapshots(call.most)
    saved: dict[int, Tensors] = {}
    stacked: list[Tensors] = []
    record.random_states = {0: get_all_generator_states()} if call.draws else {}
    number = 0
    while _goes_on(call, number, state, shared):
        if number and call.saves:
            saved[number] = state
            if call.draws:
                record.random_states[number] = get_all_generator_states()
            dropped = snapshots.visit(number)
            if dropped is not None:
                del saved[dropped]
                record.random_states.pop(dropped, None)
        state, results = call.step(state, _slices_at(call, slices, number), shared)
        stacked.append(results)
        number += 1
        let_interrupts_in()
    if call.found.inputs:
        raise NewInputError
    record.num_steps = number
    record.positions = tuple(saved)
    record.stacks_gradients = tuple(is_differentiable(t) for t in (stacked[0] if stacked else ()))
    if call.is_reversed:
        stacked.reverse()
    columns = [torch.stack(column) for column in zip(*stacked, strict=True)]
    # an output that is an input, or another output, would be a view of it to autograd
    last = [tensor.clone() if number == 0 else tensor.view_as(tensor) for tensor in state]
    if not call.lends:
        record.saved = list(saved.values())
        return [*last, *columns]
    return [*last, *columns, *(t.view_as(t) for states in saved.values() for t in states)]


def _goes_on(call: LoopCall, number: int, state: Tensors, shared: Tensors) -> bool:
    if call.length is not None:
        return number < call.length
    return bool(call.step.asks(state, shared))


def _slices_at(call: LoopCall, slices: Tensors, number: int) -> Tensors:
    if not slices:
        return []
    index = _index_of(call, number)
    return [tensor[index] for tensor in slices]


def _index_of(call: LoopCall, number: int) -> int:
    if not call.is_reversed:
        return number
    assert call.length is not None
    return call.length - 1 - number


def run_backward(
    call: LoopCall,
    record: Record,
    inputs: Sequence[Tensor],
    snapshots: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> Tensors:
    """The gradients of the inputs that vary, in their order."""
    size = call.layout.state
    saved = record.saved
    if saved is None:
        saved = [list(snapshots[i : i + size]) for i in range(0, len(snapshots), size)]
    elif _torch.keeps_graph_after_backward():
        saved = list(saved)
    with _generators_as_they_are(call.draws), call.ambient.restore(), handle_function_calls():
        return _BackwardRun(call, record, inputs, cotangents).run(saved)


@contextmanager
def _generators_as_they_are(draws: bool) -> Iterator[None]:
    states = get_all_generator_states() if draws else {}
    try:
        yield
    finally:
        set_all_generator_states(states.items())


class _BackwardRun:
    """The backward pass of a loop, from the last step to the first."""

    def __init__(
        self,
        call: LoopCall,
        record: Record,
        inputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
    ) -> None:
        self.call, self.record = call, record
        self.initial, self.slices, self.shared = call.layout.split(inputs)
        self.flags = call.layout.split(call.varies(inputs))
        num_states = sum(self.flags[0])
        self.state_cotangents = list(cotangents[:num_states])
        self.stacked_cotangents = cotangents[num_states:]
        self.slice_gradients: list[Tensor | None] = [None] * sum(self.flags[1])
        self.shared_gradients: list[Tensor | None] = [None] * sum(self.flags[2])
        self.random_states = dict(record.random_states)
        self.is_checked = False
        self.step_size = 1.0

    def run(self, saved: list[Tensors]) -> Tensors:
        """Go back from the last step to the first; `saved` is empty then."""
        positions = self.record.positions
        end = self.record.num_steps
        room = num_snapshots(end) if self.call.most is None else self.call.most
        room *= ROOM_OF_STEPS + 1
        if end > 1:
            self.step_size = self._measure_step()
        for number in range(len(positions) - 1, -1, -1):
            self._go_back(positions[number], saved.pop(), end, room - number - 1)
            end = positions[number]
        self._go_back(0, self.initial, end, room)
        varying = [*pick(self.slices, self.flags[1]), *pick(self.shared, self.flags[2])]
        found = [*self.slice_gradients, *self.shared_gradients]
        gradients = [
            torch.zeros_like(t) if gradient is None else gradient
            for t, gradient in zip(varying, found, strict=True)
        ]
        return [*self.state_cotangents, *gradients]

    def _go_back(self, start: int, state: Tensors, end: int, room: int) -> None:
        """Go back from `end` to `start`, whose state is there.

        On the way there may be `room` states, or steps with what autograd saves of them.
        """
        while end > start:
            states = room // (ROOM_OF_STEPS + 1)
            at_once = 1 + int((room - states) / self.step_size)
            if end - start <= 1 + int(room / self.step_size):
                self._differentiate(start, state, end)
                return
            if states > 0:
                num_groups = -(-(end - start) // at_once)
                until = start + at_once * choose_next(num_groups, states)
            else:
                until = end - at_once
            middle = self._advance(start, state, until)
            if states > 0:
                self._go_back(until, middle, end, room - 1)
            else:
                self._differentiate(until, middle, end)
            del middle  # it would be alive while the next one is computed
            end = until

    def _advance(self, start: int, state: Tensors, end: int) -> Tensors:
        self._set_generators(start)
        for number in range(start, end):
            slices = _slices_at(self.call, self.slices, number)
            state, _ = self.call.step(state, slices, self.shared)
            let_interrupts_in()
        if self.call.draws:
            self.random_states[end] = get_all_generator_states()
        return state

    def _set_generators(self, position: int) -> None:
        if self.call.draws:
            set_all_generator_states(self.random_states[position].items())

    def _measure_step(self) -> float:
        """The bytes of a step that are alive for its derivative, in those of a state."""
        self._set_generators(0)
        with LiveBytes() as memory:
            results = self._run_step(0, self.initial)
        nbytes = memory.live
        del results
        of_state: int = sum(t.nbytes for t in self.initial)
        return max(nbytes, 1) / max(of_state, 1)

    def _run_step(self, number: int, state: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """A step for autograd: the next state, all results that may have a gradient, and leaves."""
        slices = _slices_at(self.call, self.slices, number)
        groups = [
            [t.detach().requires_grad_(flag) for t, flag in zip(tensors, flags, strict=True)]
            for tensors, flags in zip((state, slices, self.shared), self.flags, strict=True)
        ]
        with torch.enable_grad():
            new, results = self.call.step(*groups)
        leaves = [t for tensors in groups for t in tensors if t.requires_grad]
        return new, [t for t in (*new, *results) if is_differentiable(t)], leaves

    def _differentiate(self, start: int, state: Tensors, end: int) -> None:
        """Run steps with derivatives, and pass the cotangents of their results back."""
        self._set_generators(start)
        steps: list[tuple[Tensors, Tensors]] = []
        for number in range(start, end):
            state, outputs, leaves = self._run_step(number, state)
            steps.append((outputs, leaves))
            let_interrupts_in()
        del state
        for number in range(end - 1, start - 1, -1):
            self._differentiate_step(number, *steps.pop())

    def _differentiate_step(self, number: int, outputs: Tensors, leaves: Tensors) -> None:
        index = _index_of(self.call, number)
        cotangents = [*self.state_cotangents, *(ct[index] for ct in self.stacked_cotangents)]
        num_states, num_slices = len(self.state_cotangents), len(self.slice_gradients)
        with torch.enable_grad():
            for leaf, total in zip(
                leaves[num_states + num_slices :], self.shared_gradients, strict=True
            ):
                if total is not None:  # autograd comes to the last node first, and adds to it
                    outputs.append(leaf.view_as(leaf))
                    cotangents.append(total)
        gradients = self._gradients_of(outputs, cotangents, leaves)
        self.state_cotangents = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves[:num_states], gradients[:num_states], strict=True)
        ]
        for i, gradient in enumerate(gradients[num_states : num_states + num_slices]):
            if gradient is not None:
                self._put_slice(i, index, gradient)
        self.shared_gradients = gradients[num_states + num_slices :]

    def _put_slice(self, number: int, index: int, gradient: Tensor) -> None:
        whole = self.slice_gradients[number]
        if whole is None:  # of a batch, as the gradient may be one (`is_grads_batched`)
            whole = gradient.new_zeros((self.record.num_steps, *gradient.shape))
            self.slice_gradients[number] = whole
        whole[index] = gradient

    def _gradients_of(
        self, outputs: Tensors, cotangents: Tensors, leaves: Tensors
    ) -> list[Tensor | None]:
        pairs = [(t, ct) for t, ct in zip(outputs, cotangents, strict=True) if t.requires_grad]
        if not self.is_checked:
            self.is_checked = True
            found = self.call.found.inputs
            stray = found[0] if found else find_stray_leaf([t for t, _ in pairs], leaves)
            if stray is not None:
                raise EffectError(
                    f"the function of a loop reads a tensor of shape {tuple(stray.shape)} where "
                    "the loop does not see it, so its gradient would be lost: make it a part of "
                    "the state, or of xs"
                )
        if not pairs:
            return [None] * len(leaves)
        first, second = zip(*pairs, strict=True)
        return list(torch.autograd.grad(first, leaves, second, allow_unused=True))
