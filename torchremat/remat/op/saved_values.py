"""The values that a checkpoint saved in another form: as a generator's state, or on the host."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from torchremat.remat.offload.copies import fetch_value
from torchremat.remat.op.remat_op import run_graph
from torchremat.remat.program.compiled_graph import BackwardInputs, CompiledGraph, compile_backward
from torchremat.remat.program.program import Program, cache_by_program
from torchremat.remat.program.random_replay import draw_now, is_run_again


def bring_back(
    program: Program, inputs: Sequence[Tensor], saved: Sequence[Tensor], call: int
) -> list[Tensor]:
    """The residuals of a run of `program`, which saved its `inputs` and what stands for those."""
    residuals = list(saved)
    again = _find_run_again(program)
    for i in program.replayed_random:
        if i not in again:
            residuals[i] = draw_now(program.residuals[i], residuals[i])
    for i in program.offloaded:
        residuals[i] = fetch_value(residuals[i], program.residuals[i].meta["val"].device)
    if again:
        with torch.no_grad():  # they are constants to whoever reads them
            found = run_graph(_compile_run_again(program), [*inputs, *residuals], call)
        for i, value in zip(again, found, strict=True):
            residuals[i] = value
    return residuals


def _find_run_again(program: Program) -> list[int]:
    return [i for i in program.replayed_random if is_run_again(program.residuals[i])]


@cache_by_program
def _compile_run_again(program: Program) -> CompiledGraph:
    """The graph of the residuals whose operators run again from states."""
    joint = program.root_joint
    assert joint is not None
    again, start = _find_run_again(program), len(program.saved_inputs)
    inputs: list[fx.Node | None] = [joint.inputs[i] for i in program.saved_inputs]
    inputs += [None if i in again else node for i, node in enumerate(program.residuals)]
    form = BackwardInputs(draws={start + i: program.residuals[i] for i in again})
    return compile_backward(
        joint, inputs, [program.residuals[i] for i in again], program, form=form
    )
