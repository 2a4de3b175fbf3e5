"""`remat_p`: the graph of a program as one operator of another graph.

Outside any trace a program just runs. Inside one (a checkpoint within a checkpoint, `make_graph`)
it is recorded as one node whose body is a submodule. So a reader of the outer graph can look inside
it, and what the inner checkpoint recomputes is not merged with the rest.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.errors import EffectError
from torchremat.graph.aliasing import overlapping_pair
from torchremat.graph.codegen import (
    Runner,
    compile_graph,
    inputs_filled_by,
    source_of,
    symbols_of,
)
from torchremat.graph.nodes import BodyOperator
from torchremat.graph.notes import graph_notes_of, note_graph
from torchremat.graph.symbolic_sizes import Interpreter, Sizes
from torchremat.policies.failed_operator import FailedOperator
from torchremat.remat.program.compiled_graph import CompiledGraph
from torchremat.remat.program.program import Program
from torchremat.tracing.ambient_state import without_autocast


class RematOp(BodyOperator):
    """Runs the graph of a program: `remat_p(body, *inputs)`, with `body` a `GraphModule`."""

    outside_traces: Callable[..., tuple[Any, ...]] | None = None
    """How a graph that contains the operator runs it, operator by operator: `remat/op_rules.py`."""
    params_of: Callable[[dict[str, Any]], dict[str, Any]] = staticmethod(lambda params: {})
    """Returns what equations show of the body: the policy."""

    def __init__(self) -> None:
        super().__init__("remat_p")  # type: ignore[no-untyped-call]

    def __call__(
        self, body: fx.GraphModule, /, *inputs: Any, call: int | None = None
    ) -> tuple[Any, ...]:
        """Run `body`. `call` is the same for what runs forward and backward in one trace."""
        if _torch.innermost_proxy_mode() is None and self.outside_traces is not None:
            return self.outside_traces(body, *inputs)
        return super().__call__(body, *inputs, call=call)  # type: ignore[no-any-return,no-untyped-call]

    def runner_of(self, body: fx.GraphModule) -> Runner:
        notes = graph_notes_of(body)
        runner: Runner | None = notes.runner
        if runner is None:
            compiler = getattr(notes.program, "compiler", None)
            runner = compiler(body) if compiler else compile_graph(body, "body")
            note_graph(body, runner=runner)
        return runner


remat_p = RematOp()


def run_program(
    program: Program,
    inputs: Sequence[Any],
    call: int | None = None,
    sizes: Sizes | None = None,
    *,
    notes_views: bool = False,
    with_states: bool = False,
) -> tuple[Any, ...]:
    """Outputs and residuals of `program`, after its writes to inputs.

    `with_states`: states of generators in place of random residuals that are drawn again, and
    copies in the host's memory of those that are offloaded.
    With `notes_views` autograd knows which outputs are views, and refuses to have them written to.
    """
    writes = program.writes
    if writes:
        _refuse_shared_memory(inputs, writes)
    forward = program.runtime_forward if with_states else program.forward
    in_place = () if _torch.innermost_proxy_mode() else inputs_filled_by(forward.run)
    _refuse_inference_tensors(inputs, in_place)
    results = run_graph(forward, list(inputs), call, sizes, notes_views=notes_views)
    if not writes:
        return results
    start = program.num_outputs
    end = start + len(writes)
    with torch.no_grad():
        for i, value in zip(writes, results[start:end], strict=True):
            if i in in_place:
                torch.autograd.graph.increment_version(inputs[i])
            else:
                inputs[i].copy_(value)
    outputs = list(results[:start])
    with torch.no_grad():
        for output in program.written_outputs:
            outputs[output.position] = output.of(inputs[output.written], sizes)
        residuals = list(results[end:])
        for residual in () if _torch.innermost_proxy_mode() else program.written_residuals:
            residuals[residual.position] = residual.of(inputs[residual.written], sizes)
    return (*outputs, *residuals)


def _refuse_shared_memory(inputs: Sequence[Any], writes: Sequence[int]) -> None:
    """Raise if an input that is written to shares memory with another, which the trace ignores.

    Parts of one tensor that do not overlap, a cache of keys and one of values say, may be written.
    """
    pair = overlapping_pair(inputs, writes)
    if pair is not None:
        i, j = pair
        raise EffectError(
            f"the function writes in place to its input {i}, of shape {tuple(inputs[i].shape)}, "
            f"which shares memory with its input {j}, of shape {tuple(inputs[j].shape)}: a graph "
            "does not see the write through the other. Tensors that it closes over are counted "
            "after its arguments. Pass a copy (clone()) of one of them."
        )


def _refuse_inference_tensors(inputs: Sequence[Any], in_place: Sequence[int]) -> None:
    """Raise where autograd would, below which a graph writes to these of its inputs."""
    for i in in_place:
        if inputs[i].is_inference() and not torch.is_inference_mode_enabled():
            inputs[i].copy_(inputs[i])


def records_gradients(inputs: Sequence[Any]) -> bool:
    tensors = (t for t in inputs if isinstance(t, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def run_graph(
    compiled: CompiledGraph,
    inputs: list[Any],
    call: int | None = None,
    sizes: Sizes | None = None,
    *,
    notes_views: bool = False,
) -> tuple[Any, ...]:
    """Run the graph on `inputs`, which it empties; in a trace, record it as one node.

    `sizes` are the values of the symbols that the graph may depend on.
    """
    if _torch.innermost_proxy_mode() is not None:
        return remat_p(compiled.module, *inputs, call=call)
    if sizes is not None:
        inputs[:0] = [sizes[name] for name in symbols_of(compiled.run)]
    mode: Any = _torch.below_autograd()
    if notes_views:
        # a view made while gradients are off may not be written to while they are on
        mode = torch.no_grad() if records_gradients(inputs) else nullcontext()
    return _run_with_note(compiled, mode, compiled.run, inputs)


def resume_graph(compiled: CompiledGraph, steps: Iterator[None]) -> None:
    """Run the next stage of the graph."""
    _run_with_note(compiled, _torch.below_autograd(), next, steps)


def _run_with_note(
    compiled: CompiledGraph, mode: Any, run: Callable[[Any], tuple[Any, ...]], argument: Any
) -> tuple[Any, ...]:
    try:
        if _torch.is_any_autocast_enabled():
            with without_autocast(), mode:
                return run(argument)
        with mode:
            return run(argument)
    except RuntimeError as error:
        note_if_out_of_memory(error, compiled)
        raise


def _interpret(body: fx.GraphModule, *inputs: Any, call: int | None = None) -> tuple[Any, ...]:
    return tuple(Interpreter(body).run(*inputs))


_torch.register_simple_rules(remat_p, _interpret)


# the CPU's allocator raises a plain RuntimeError with this message
_OF_THE_CPU = "DefaultCPUAllocator: can't allocate memory"


def note_if_out_of_memory(error: RuntimeError, compiled: CompiledGraph) -> None:
    notes = graph_notes_of(compiled.module)
    program: Program | None = notes.program
    is_of_memory = isinstance(error, torch.OutOfMemoryError) or _OF_THE_CPU in str(error)
    if program is None or not is_of_memory:
        return
    phase = "backward" if notes.cut is not None else "forward"
    try:
        note = program.policy.out_of_memory(
            program, FailedOperator(phase, _node_of(error, compiled))
        )
    except Exception as trouble:  # the error that matters is the first
        note = f"torchremat: the plan cannot be shown: {trouble!r}"
    if note is not None:
        error.add_note(note)


def _node_of(error: RuntimeError, compiled: CompiledGraph) -> fx.Node | None:
    for frame, number in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith("<torchremat"):
            continue
        lines = source_of(frame.f_globals["run"]).splitlines()
        if number > len(lines):
            continue
        name = lines[number - 1].partition(" = ")[0].partition(",")[0].strip()
        nodes = compiled.module.graph.nodes
        return next((node for node in nodes if node.name == name), None)
    return None
