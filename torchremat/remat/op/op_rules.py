"""The rules of `remat_p` and `name_p` in a graph that runs again, under any transformation.

A checkpoint in a graph stays a checkpoint: its body, with the policy that it was traced with,
becomes a program whenever it is differentiated or mapped.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.bodies import NotedBody
from torchremat.autodiff.joint import TraceOptions
from torchremat.graph.nodes import results_of
from torchremat.graph.notes import graph_notes_of, note_graph
from torchremat.policies.builtin import nothing_saveable
from torchremat.policies.checkpoint_name import checkpoint_name, name_p
from torchremat.policies.policy import Policy
from torchremat.remat.op.autograd_functions import apply_program
from torchremat.remat.op.remat_op import remat_p
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.region import Region
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.tracing import has_symbols

_programs: weakref.WeakKeyDictionary[fx.GraphModule, dict[Any, FunctionProgram]] = (
    weakref.WeakKeyDictionary()
)


def policy_of(body: fx.GraphModule) -> Policy:
    policy: Policy | None = graph_notes_of(body).checkpoint_policy
    return nothing_saveable if policy is None else policy


def _program_of(body: fx.GraphModule, inputs: tuple[Tensor, ...]) -> FunctionProgram:
    specs = tuple(InputSpec.of(tensor, any_level=True) for tensor in inputs)
    symbolic = has_symbols(specs)
    programs = {} if symbolic else _programs.setdefault(body, {})
    if symbolic or specs not in programs:
        region = Region(
            NotedBody(body),
            specs,
            [node.name for node in body.graph.find_nodes(op="placeholder")],
            ModulePaths({}),
            TraceOptions(with_gradients=True),
        )
        program = FunctionProgram(region, policy_of(body))
        note_graph(program.forward.module, origin=body)
        if symbolic:
            return program
        programs[specs] = program
    return programs[specs]


def _apply(body: fx.GraphModule, *inputs: Tensor, call: int | None = None) -> tuple[Any, ...]:
    del call
    tensors = iter(apply_program(_program_of(body, inputs), body, inputs))
    # a body of which not all outputs are read has `None` in the places of the others
    return tuple(next(tensors) if isinstance(r, fx.Node) else r for r in results_of(body))


def _run_outside_traces(body: fx.GraphModule, *inputs: Tensor) -> tuple[Any, ...]:
    if _torch.functorch_is_active():
        return _apply(body, *inputs)
    if not _torch.is_below_autograd():  # there nothing is differentiated, nor has a tangent
        records = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        if records or _torch.in_dual_level():
            return _apply(body, *inputs)
    return remat_p.runner_of(body)(list(inputs))


remat_p.outside_traces = _run_outside_traces
remat_p.params_of = lambda params: {"policy": policy_of(params["body"])}
_torch.register_derivative_rules(remat_p, _apply)
_torch.register_derivative_rules(name_p, lambda x, *, name: checkpoint_name(x, name))
