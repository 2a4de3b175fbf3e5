"""One call of a loop, from trees to tensors and back."""

from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.accelerators import get_all_generator_states, set_all_generator_states
from torchremat.core.trees import Structure
from torchremat.errors import EffectError
from torchremat.loops.captured import NewInputError, announce
from torchremat.loops.loop_function import run_loop
from torchremat.loops.runs import ROOM_OF_STEPS, LoopCall, Record
from torchremat.loops.step import Tensors, UserStep, as_tensor, is_leaf_of_state
from torchremat.planning.budget import bytes_of_limit
from torchremat.tracing.ambient_state import AmbientState

# Runs after which a function is taken to make the tensors that it seems to close over. Two are
# enough but under `torch.func`, where each run ends at the first that is new. Chosen by hand.
_MOST_RUNS = 200


def flatten_state(init: Any) -> tuple[Structure, Tensors]:
    """The structure of a first state, and its tensors; numbers become tensors."""
    structure = Structure.of(init, is_leaf_of_state, is_result=True)
    return structure, [as_tensor(leaf) for leaf in structure.flatten(init)]


def call_loop(
    step: UserStep,
    state: Tensors,
    slices: Tensors,
    *,
    length: int | None,
    is_reversed: bool = False,
    budget: int | str | None,
) -> tuple[Tensors, Tensors]:
    """The last state, and the stacked results.

    In a trace the loop is written out, and the policy of the graph decides what is saved.
    """
    if _torch.innermost_proxy_mode() is not None:
        return _write_out(step, state, slices, length, is_reversed)
    most = None
    if budget is not None:
        nbytes = sum(tensor.nbytes for tensor in state)
        most = bytes_of_limit(budget, "budget") // (max(nbytes, 1) * (ROOM_OF_STEPS + 1))
    first = [tensor.select(0, -1 if is_reversed else 0) for tensor in slices]
    if not step.look(state, first):
        return state, []
    before = get_all_generator_states()
    for _ in range(_MOST_RUNS):
        inputs = [*state, *slices, *announce(*step.captured)]
        try:
            outputs = _run(step, inputs, length, is_reversed, most)
        except NewInputError:
            step.take_found()
            set_all_generator_states(before.items())
            continue
        step.check_versions()
        if not step.draws and _has_drawn(before):  # not the first step, but one after it
            step.draws = True
            set_all_generator_states(before.items())
            continue
        num_states = step.layout.state
        return list(outputs[:num_states]), list(outputs[num_states:][: step.layout.stacked])
    raise EffectError(
        f"the function of a loop reads other tensors in each of {_MOST_RUNS} runs: make those that "
        "it computes parts of the state"
    )


def _run(
    step: UserStep, inputs: Tensors, length: int | None, is_reversed: bool, most: int | None
) -> tuple[Tensor, ...]:
    call = LoopCall(
        step,
        length,
        is_reversed,
        most,
        saves=_is_differentiated(inputs),
        lends=_torch.functorch_is_active(),
        draws=step.draws,
        ambient=AmbientState.now(),
        found=step.found,
    )
    return run_loop(call, Record(), *inputs)


def _write_out(
    step: UserStep, state: Tensors, slices: Tensors, length: int | None, is_reversed: bool
) -> tuple[Tensors, Tensors]:
    stacked: list[Tensors] = []
    while step.asks_plainly(state) if length is None else len(stacked) < length:
        index = -1 - len(stacked) if is_reversed else len(stacked)
        state, results = step.run_plainly(state, [tensor[index] for tensor in slices])
        stacked.append(results)
    if is_reversed:
        stacked.reverse()
    return state, [torch.stack(column) for column in zip(*stacked, strict=True)]


def _has_drawn(before: dict[torch.device, Tensor]) -> bool:
    after = get_all_generator_states()
    return any(not torch.equal(after[device], state) for device, state in before.items())


def _is_differentiated(inputs: Tensors) -> bool:
    if _torch.functorch_is_active() or _torch.in_dual_level():
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
