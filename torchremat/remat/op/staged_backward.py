"""Gradients that are handed out while the backward pass runs, not all at its end.

A node of autograd's graph hands out all its gradients when it returns. So a program with many
parameters has a chain of nodes, one for each of its stages (`remat/program/stages.py`):

    output -> Checkpoint -> Stage -> Stage
                 |            |        |
               w3, b3       w2, b2   w1, b1, x

The first runs the backward graph up to its gradients. What is left to run is an attribute of the
gradient that it gives the next. Autograd accumulates the gradients of parameters before it goes on
to the next node. So whatever waits for them, an optimizer or the sum over processes, begins then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from torchremat import _torch
from torchremat.graph.codegen import symbols_of
from torchremat.graph.hand_outs import Groups
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.remat.op.remat_op import resume_graph
from torchremat.remat.program.compiled_graph import CompiledGraph
from torchremat.remat.program.program import Program

Rest = Callable[[], tuple[Any, ...]]
"""The rest of a backward pass: each call gives the gradients of the next stage."""

EdgeTest = Callable[[Sequence[Any]], tuple[bool, ...]]
"""Says something of each of some edges of autograd's graph."""


class Stage(torch.autograd.Function):
    """A node that hands out the gradients of one stage, and the rest to the next."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, token: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[Any, ...]:
        if token is None:  # the outputs have no gradients
            return (None,) * len(ctx.needs_input_grad)
        rest: Rest = token.rest  # type: ignore[attr-defined]
        return (None, token if ctx.needs_input_grad[1] else None, *rest())


_apply_stage: Callable[..., Tensor] = _torch.direct_apply(Stage)


def hands_out_early(program: Program, inputs: Sequence[Tensor]) -> bool:
    """Whether it is worth a chain: in long programs, or where somebody is seen to wait.

    That is a hook on a parameter, or another process, whose hooks Python does not see.
    """
    if _torch.innermost_proxy_mode() is not None:
        return False
    if program.policy.steps_in_backward:
        if not any(_torch.has_gradient_hooks(inputs[i]) for i in program.region.wrt):
            program.policy.begin_updates()
        return True
    if program.is_long or (distributed.is_available() and distributed.is_initialized()):
        return True
    return any(_torch.has_gradient_hooks(inputs[i]) for i in program.region.wrt)


def make_chain(program: Program, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The output of the chain, and the tensors whose gradients the node that reads it hands out.

    `tensors` are those of the program's slots.
    """
    first, *later = program.stages
    token = None
    for stage in reversed(later):
        token = _apply_stage(program.device, token, *(tensors[slot] for slot in stage))
    assert token is not None
    return token, [tensors[slot] for slot in first]


def spread_over_slots(program: Program, node: Any, test: EdgeTest) -> tuple[bool, ...]:
    """Test the edges of the chain that begins at `node`: one flag for each slot."""
    flags: list[bool] = [False] * len(program.gradient_slots or range(program.num_inputs))
    for number, stage in enumerate(program.stages):
        edges = node.next_functions
        has_next = number < len(program.stages) - 1
        for slot, found in zip(stage, test(edges[has_next:]), strict=True):
            flags[slot] = found
        node = edges[0][0] if has_next else None
    return tuple(flags)


def hand_out_later(rest: Rest, device: torch.device) -> Tensor:
    """The gradient that the first node gives the next one."""
    token = torch.empty(0, device=device)
    token.rest = rest  # type: ignore[attr-defined]
    return token


def in_order(stages: Groups, gradients: Sequence[Any]) -> Rest:
    """Hand out gradients that are there already, one for each slot: at once without stages."""
    if not stages:
        return lambda: tuple(gradients)
    return [tuple([gradients[slot] for slot in stage]) for stage in reversed(stages)].pop


def run_in_stages(
    compiled: CompiledGraph, program: Program, inputs: list[Any], sizes: Sizes | None
) -> Rest:
    """Run the graph on `inputs`, which it empties, as far as each stage needs when that asks."""
    run = compiled.functions.in_stages(program.stages, program.gradient_targets)
    if sizes is not None:
        inputs[:0] = [sizes[name] for name in symbols_of(run)]
    given: list[Any] = []
    steps = run(inputs, given)

    def go_on() -> tuple[Any, ...]:
        resume_graph(compiled, steps)
        gradients = tuple(given)
        given.clear()
        return gradients

    return go_on
