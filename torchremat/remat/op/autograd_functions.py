"""How autograd and `torch.func` see a program: as one differentiable operator.

There are two autograd functions. `Checkpoint` is for plain autograd: it saves intermediate values
and costs little. `FunctionalCheckpoint` is for `torch.func`, where a saved value must be an output.
There each level of transformation finds its rule: backward, `vmap` and `jvp`. In both, the
derivative is the vector-Jacobian product of the program, which is a program again.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.autodiff.gradient_parts import fill_slots
from torchremat.autodiff.replay_rules import draws_in_forward
from torchremat.core.accelerators import is_captured
from torchremat.core.trees import scatter_values
from torchremat.errors import EffectError
from torchremat.graph.aliasing import spread
from torchremat.graph.notes import notes_of
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.remat.offload.copies import expect, note_kept, wait_for_copies
from torchremat.remat.op.edges import Edges
from torchremat.remat.op.node_hooks import call_where_needed, limit_hooks
from torchremat.remat.op.remat_op import records_gradients, run_graph, run_program
from torchremat.remat.op.saved_values import bring_back
from torchremat.remat.op.second_part import SecondPart
from torchremat.remat.op.staged_backward import (
    EdgeTest,
    Rest,
    hand_out_later,
    hands_out_early,
    in_order,
    make_chain,
    run_in_stages,
    spread_over_slots,
)
from torchremat.remat.program.derived_programs import (
    batch_program,
    floating_outputs,
    jvp_program,
    vjp_program,
)
from torchremat.remat.program.program import Program
from torchremat.remat.program.region import VmapAxis
from torchremat.remat.program.split_backward import split_backward
from torchremat.tracing.axes.named_axes import frame_being_mapped, map_over
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.tracing import current_tracing, lift_all


def apply_program(
    program: Program, owner: object, inputs: Sequence[Tensor], sizes: Sizes | None = None
) -> tuple[Any, ...]:
    """Run `program`; its outputs are differentiable in every way.

    `sizes` are the values of the symbols in it, of which there are none under `torch.func`.
    `owner` lives as long as autograd's record: it is the traced function, which a derivative of
    higher order traces again.
    """
    if _torch.innermost_proxy_mode() is None:
        return _apply_at_level(program, owner, inputs, sizes)
    inputs = lift_all(inputs)
    tracing = current_tracing()
    if tracing is None:
        return _apply_at_level(program, owner, inputs, sizes)
    with tracing.keep_grad_mode():  # an autograd function switches it off for what is recorded
        return _apply_at_level(program, owner, inputs, sizes)


def _apply_at_level(
    program: Program, owner: object, inputs: Sequence[Tensor], sizes: Sizes | None
) -> tuple[Any, ...]:
    if not _torch.functorch_is_active():
        if _torch.in_dual_level() and _torch.has_tangents(inputs):
            return _torch.push_dual_numbers_forward(_forward_rule(program, owner), inputs)
        if program.views and not _torch.innermost_proxy_mode() and not records_gradients(inputs):
            results = run_program(program, inputs, next(_calls), sizes, notes_views=True)
            return results[: program.num_outputs]  # its views, as the operators made them
        if program.stages and records_gradients(inputs) and hands_out_early(program, inputs):
            token, first = make_chain(program, program.by_slot(inputs))
            return _staged_apply(program, sizes, owner, inputs, token, *first)  # type: ignore[no-any-return]
        return _direct_apply(program, sizes, owner, *program.by_slot(inputs))  # type: ignore[no-any-return]
    if program.axis_names:
        inputs = map_over(program.axis_names, inputs)
    level = _torch.innermost_transform()
    if level == _torch.TransformType.Jvp:
        return _torch.push_forward_at_current_level(_forward_rule(program, owner), inputs)
    if level == _torch.TransformType.Functionalize:
        return _torch.apply_to_functional(  # type: ignore[no-any-return]
            lambda inner: apply_program(program, owner, inner), inputs
        )
    results = FunctionalCheckpoint.apply(program, owner, _torch.differentiates(), *inputs)  # type: ignore[no-untyped-call]
    return results[: program.num_outputs]  # type: ignore[no-any-return]


class Checkpoint(torch.autograd.Function):
    """A program under plain autograd: what a user sees as `grad_fn=<CheckpointBackward>`."""

    boxed_grads_call = True  # else autograd holds the cotangents until the backward pass returns

    @staticmethod
    def forward(
        ctx: Any, program: Program, sizes: Sizes | None, owner: object, *inputs: Tensor
    ) -> tuple[Any, ...]:
        if program.gradient_slots:
            inputs = tuple([inputs[slot] for slot in program.first_slots])
        ctx.stages = ()
        return _run_and_save(ctx, program, sizes, owner, inputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        rest = _apply_vjp(ctx, _take_cotangents(given))
        if rest is None:
            return (None,) * len(ctx.needs_input_grad)
        return (None, None, None, *rest())


class StagedCheckpoint(torch.autograd.Function):
    """A program whose gradients are handed out by a chain of nodes, of which this is the first."""

    boxed_grads_call = True

    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        sizes: Sizes | None,
        owner: object,
        inputs: Sequence[Tensor],
        token: Tensor,
        *first: Tensor,
    ) -> tuple[Any, ...]:
        ctx.stages = program.stages
        return _run_and_save(ctx, program, sizes, owner, inputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        rest = _apply_vjp(ctx, _take_cotangents(given))
        if rest is None:
            return (None,) * len(ctx.needs_input_grad)
        now = rest()
        return (None, None, None, None, hand_out_later(rest, ctx.program.device), *now)


def _run_and_save(
    ctx: Any, program: Program, sizes: Sizes | None, owner: object, inputs: Sequence[Tensor]
) -> tuple[Any, ...]:
    """The outputs of the program; what its backward pass reads is saved in `ctx`."""
    ctx.call = next(_calls)
    ctx.sizes = sizes
    offloads = bool(program.offloaded)
    in_other_form = offloads or bool(program.replayed_random)
    ctx.with_states = in_other_form and not _torch.is_faking() and not is_captured()
    results = run_program(
        program,
        inputs,
        ctx.call,
        sizes,
        notes_views=bool(program.views),
        with_states=ctx.with_states,
    )
    if offloads and ctx.with_states and _torch.has_saved_tensors_hooks():
        wait_for_copies()  # the hooks receive the copies, and may read them
    num_outputs = program.num_outputs
    outputs = results[:num_outputs]
    outputs = _as_views(program, outputs) if program.views else outputs
    ctx.program = program
    ctx.owner = owner
    ctx.second_part = None
    ctx.set_materialize_grads(False)
    constant = program.non_differentiable
    if constant:
        ctx.mark_non_differentiable(*(outputs[i] for i in constant))
    if any(ctx.needs_input_grad):
        residuals = results[num_outputs:]
        ctx.save_for_backward(*(inputs[i] for i in program.saved_inputs), *residuals)
        if offloads and ctx.with_states:
            kept = [residuals[i] for i in program.offloaded]
            ctx.kept_before = note_kept(kept, program.fetched_first)
        if program.missing_inputs:
            ctx.are_tensors = tuple(isinstance(t, Tensor) for t in inputs)
        if program.grad_edges:
            ctx.edges = Edges([inputs[i] for i in program.grad_edges])
    return outputs


def _as_views(program: Program, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Let autograd know which outputs share memory, so that it refuses to have them written to."""
    # a `detach` in a trace would be one of the traced function, wherever its graph runs
    constant = () if _torch.innermost_proxy_mode() is not None else program.non_differentiable
    with torch.no_grad():
        return tuple(
            value
            if i not in program.views
            else value.detach()
            if i in constant
            else value.view_as(value)
            for i, value in enumerate(outputs)
        )


_calls = itertools.count()


_direct_apply = _torch.direct_apply(Checkpoint)
StagedCheckpoint.__name__ = "Checkpoint"  # users see its node as any other checkpoint's
_staged_apply = _torch.direct_apply(StagedCheckpoint)
for _node_class in (_torch.node_class_of(Checkpoint), _torch.node_class_of(StagedCheckpoint)):
    limit_hooks(_node_class)
    _torch.wrap_tensor_hooks(_node_class, call_where_needed)


class FunctionalCheckpoint(torch.autograd.Function):
    """A program under `torch.func`: with `returns_residuals` they are its last outputs."""

    @staticmethod
    def forward(
        program: Program, owner: object, returns_residuals: bool, *inputs: Tensor
    ) -> tuple[Any, ...]:
        count = program.num_outputs
        given = set(map(id, inputs))
        results = tuple(
            r.view_as(r) if id(r) in given else spread(r)  # else no derivative could be saved
            for r in run_program(program, inputs)
        )
        if not returns_residuals:
            return results[:count]
        outputs = set(map(id, results[:count]))
        # a residual that is an output would mark that output as one without a derivative
        residuals = (r.view_as(r) if id(r) in outputs else r for r in results[count:])
        return (*results[:count], *residuals)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        program, ctx.owner, _, *tensors = inputs
        ctx.program = program
        ctx.set_materialize_grads(False)
        residuals = output[program.num_outputs :]
        ctx.mark_non_differentiable(*(output[i] for i in program.discrete), *residuals)
        ctx.num_residuals = len(residuals)
        ctx.save_for_backward(*tensors, *residuals)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        program: Program = ctx.program
        count = program.num_inputs
        given = tuple(cotangents[i] is not None for i in program.differentiable)
        if not any(given):
            return (None,) * (count + 3)
        # of a level that is over: the function of `torch.func.vjp` runs outside of its own
        saved = _torch.unwrap_dead_wrappers(ctx.saved_tensors)
        inputs, residuals = saved[:count], saved[count:]
        vjp = vjp_program(program, given, frozenset())
        num_body = len(program.region.specs)
        body = inputs[:num_body]
        known = inputs[num_body:][: len(program.known_values)]
        chosen = [ct for i in program.differentiable if (ct := cotangents[i]) is not None]
        found = apply_program(vjp, ctx.owner, [*body, *chosen, *known, *residuals])
        return (None, None, None, *scatter_values(found, vjp.wrt, count))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        program: Program,
        owner: object,
        returns_residuals: bool,
        *inputs: Tensor,
    ) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
        frame = frame_being_mapped()
        name = None if frame is None else frame.name
        axis = VmapAxis(tuple(in_dims[3:]), info.batch_size, info.randomness, name)
        specs = tuple(InputSpec.of(t, any_level=True) for t in inputs)
        batched, out_dims = batch_program(program, specs, axis, returns_residuals=returns_residuals)
        return apply_program(batched, owner, inputs), out_dims

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        return _tangents_of_outputs(ctx, tangents[3:])


def _take_cotangents(given: tuple[Any, ...]) -> list[Tensor | None]:
    """Take what autograd hands over: cotangents, or one list of them, which is empty afterwards."""
    if len(given) != 1 or not isinstance(given[0], list):
        return list(given)  # by an older PyTorch, without `boxed_grads_call`
    cotangents = given[0].copy()
    given[0].clear()
    return cotangents


def _apply_vjp(ctx: Any, cotangents: list[Tensor | None]) -> Rest | None:
    """Empty `cotangents`; return what hands out the gradients, `None` if no output has one."""
    program: Program = ctx.program
    given = tuple(cotangents[i] is not None for i in program.differentiable)
    if not any(given):
        return None
    program.note_cotangents(given)
    saved = list(ctx.saved_tensors)
    chosen = [ct for i in program.differentiable if (ct := cotangents[i]) is not None]
    cotangents.clear()
    if torch.is_grad_enabled():
        return in_order(ctx.stages, _apply_vjp_differentiably(ctx, given, saved, chosen))
    ctx.maybe_clear_saved_tensors()
    needed = _test_edges(ctx, _torch.edges_that_run)
    if _torch.keeps_graph_after_backward() or ctx.second_part is not None:
        found = _apply_vjp_in_parts(ctx, given, needed, saved, chosen)
        if found is not None:
            return in_order(ctx.stages, found)
    saved += chosen
    del chosen
    backward = program.backward(given, needed, with_states=ctx.with_states)
    if ctx.sizes and not program.region.holds(ctx.sizes):  # by what the trace of a variant assumed
        specialized = ctx.program.specialize(ctx.sizes)
        backward = specialized.backward(given, needed, with_states=ctx.with_states)
    if ctx.with_states and program.offloaded:
        expect(ctx.kept_before)
    if not ctx.stages:
        return partial(run_graph, backward, saved, ctx.call, ctx.sizes)
    if _torch.innermost_proxy_mode() is not None:
        return in_order(ctx.stages, run_graph(backward, saved, ctx.call, ctx.sizes))
    return run_in_stages(backward, program, saved, ctx.sizes)


def _test_edges(ctx: Any, test: EdgeTest) -> tuple[bool, ...]:
    """For each input, what `test` says of the edge to it; one that is not a tensor has none."""
    program: Program = ctx.program
    flags = spread_over_slots(program, ctx, test) if ctx.stages else test(ctx.next_functions)
    if program.gradient_slots:
        return tuple([flags[slot] for slot in program.first_slots])
    if not program.missing_inputs:
        return tuple(flags)
    edges = iter(flags)
    return tuple(is_tensor and next(edges) for is_tensor in ctx.are_tensors)


def _apply_vjp_in_parts(
    ctx: Any,
    given: tuple[bool, ...],
    needed: tuple[bool, ...],
    saved: list[Tensor],
    cotangents: list[Tensor],
) -> tuple[Any, ...] | None:
    """The gradients of one of two parts, where a caller runs the backward pass in two."""
    second: SecondPart | None = ctx.second_part
    ctx.second_part = None
    if second is not None and second.is_of(given, needed, cotangents):
        return second.run([*saved, *cotangents], ctx.call)
    all_edges = _test_edges(ctx, lambda edges: tuple([node is not None for node, _ in edges]))
    if needed == all_edges or ctx.sizes or not _torch.keeps_graph_after_backward():
        return None
    parts = split_backward(ctx.program, given, all_edges, needed, with_states=ctx.with_states)
    results = run_graph(parts.first, [*saved, *cotangents], ctx.call)
    cut = len(results) - parts.num_carried
    ctx.second_part = SecondPart(parts, given, needed, cotangents, list(results[cut:]))
    return results[:cut]


def _apply_vjp_differentiably(
    ctx: Any, given: tuple[bool, ...], saved: list[Tensor], cotangents: list[Tensor]
) -> Sequence[Any]:
    program: Program = ctx.program.specialize(ctx.sizes) if ctx.sizes else ctx.program
    count = program.num_inputs
    absent = frozenset(range(count)) - frozenset(program.saved_inputs)
    vjp = vjp_program(program, given, _shift_known(absent, program, len(cotangents)))
    num_body = len(program.region.specs)
    inputs: list[Any] = [None] * count
    for i, tensor in zip(program.saved_inputs, saved, strict=False):
        inputs[i] = tensor
    if program.grad_edges:
        for i, tensor in zip(program.grad_edges, ctx.edges.tensors(), strict=True):
            inputs[i] = tensor
    residuals = saved[len(program.saved_inputs) :]
    if ctx.with_states:
        residuals = bring_back(program, saved[: len(program.saved_inputs)], residuals, ctx.call)
    body, known = inputs[:num_body], inputs[num_body:][: len(program.known_values)]
    found = apply_program(vjp, ctx.owner, [*body, *cotangents, *known, *residuals])
    gradients = scatter_values(found, vjp.wrt, count)
    if program.gradient_slots:
        gradients = fill_slots(program.gradient_slots, (), gradients)
    return gradients


def _shift_known(absent: frozenset[int], program: Program, num_cotangents: int) -> frozenset[int]:
    """Positions among the inputs of the derivative, which has cotangents before known values."""
    num_body = len(program.region.specs)
    return frozenset(i if i < num_body else i + num_cotangents for i in absent)


# --- forward mode --------------------------------------------------------------------------------


def _tangents_of_outputs(ctx: Any, tangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The tangents of the outputs; none for residuals, which are constants to their readers."""
    program: Program = ctx.program
    _refuse_second_draw(program)
    inputs = ctx.saved_tensors[: program.num_inputs]
    found = _run_jvp(program, ctx.owner, inputs, tangents, keep_primals=False)
    return (*found, *[None] * ctx.num_residuals)


def _refuse_second_draw(program: Program) -> None:
    """Raise where tangents would be of other random numbers than the outputs, which are there."""
    for node in program.region.joint.forward_nodes:
        if draws_in_forward(node):
            raise EffectError(
                f"forward mode over reverse mode (jvp of grad) of a checkpoint would draw again "
                f"what {node.target} draws at {notes_of(node).source}: its tangent would be that "
                "of other numbers. Draw outside of the checkpoint, and pass the numbers in."
            )


def _run_jvp(
    program: Program,
    owner: object,
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    *,
    keep_primals: bool,
) -> tuple[Any, ...]:
    body = inputs[: len(program.region.specs)]
    wrt = tuple(i for i, _ in enumerate(body) if tangents[i] is not None)
    if not wrt:
        # levels below may differentiate it
        primals = apply_program(program, owner, inputs) if keep_primals else ()
        return (*primals, *[None] * program.num_outputs)
    given = [tangents[i] for i in wrt]
    operands: list[Any] = [*body, *given]
    specs = tuple(InputSpec.of(t, any_level=True) for t in operands)
    jvp = jvp_program(program, wrt, specs, keep_primals=keep_primals)
    results = list(apply_program(jvp, owner, operands))
    outputs = [results.pop(0) for _ in range(program.num_outputs)] if keep_primals else []
    return (*outputs, *scatter_values(results, floating_outputs(program), program.num_outputs))


def _forward_rule(program: Program, owner: object) -> Any:
    """The rule for dual numbers: one program computes the outputs with their tangents."""
    count = program.num_outputs

    def rule(primals: list[Tensor], tangents: list[Tensor | None]) -> tuple[Any, Any]:
        results = _run_jvp(program, owner, primals, tangents, keep_primals=True)
        return results[:count], results[count:]

    return rule
