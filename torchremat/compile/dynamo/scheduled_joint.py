"""A joint graph in the order of a plan, in which some operators run repeatedly.

A compiler's partitioner saves a value or recomputes it. A plan says more: a value may be freed and
recomputed once more, so that it does not stay alive between two distant readers. Each such run is a
node of its own, which nothing merges with another.

    plan        backward  x = conv(a), dy(x), ..., x = conv(a), dz(x)
    graph       x_again = conv(a);  dy(x_again);  ...;  x_again_1 = conv(a);  dz(x_again_1)
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.compile.dynamo.input_copies import drop_copies_for, writes_input
from torchremat.graph.nodes import is_forward, is_item, is_size, is_view
from torchremat.graph.notes import note
from torchremat.graph.schedule import GraphSchedule, ReplayBuilder
from torchremat.graph.slicing import UnavailableError
from torchremat.graph.symbolic_sizes import SYMBOLIC


class Run(NamedTuple):
    """A run of an operator in the backward pass.

    Attributes:
        number: which recomputation of the operator it is; 0 if it is none.
        step: how many operators that need cotangents run before it.
        call: the name of the operator.
    """

    number: int
    step: int
    call: str


# PyTorch copies `node.meta["custom"]` when it decomposes a graph; the `Run` is under:
_RUN = "torchremat_run"

# Kernels so few steps apart may be one; farther apart, values stay alive too long. By hand.
FAR = 6

# A reduction to this share or less is not repeated where its small result is saved. By hand.
LITTLE = 1 / 16


def schedule_joint(
    joint: Joint, schedule: GraphSchedule, num_forward_outputs: int, once: Collection[fx.Node]
) -> fx.GraphModule | None:
    """The joint graph in the order of `schedule`; calls in `once` run in the forward pass alone.

    `None` if the values do not determine the graph: one becomes a number, or an operator has an
    effect.
    """
    graph = joint.module.graph
    if not schedule.backward or not _is_determined_by_values(joint, schedule):
        return None
    (output,) = graph.find_nodes(op="output")
    results: Sequence[Any] = output.args[0]
    placeholders = graph.find_nodes(op="placeholder")
    builder = ReplayBuilder(placeholders)
    for node in placeholders:
        builder.copies[node].target = node.target
    _copy_sizes(builder, placeholders)
    for call in schedule.forward:
        if not is_size(call):
            builder.run(call)
            _copy_sizes(builder, [call])
    found = [_copy_of_result(builder, r) for r in results[:num_forward_outputs]]
    writes = [node for node in graph.nodes if writes_input(node)]
    written = [builder.value(node.args[1]) for node in writes]
    for node in builder.graph.nodes:
        if node.op == "call_function":
            note(node, phase="forward")
            node.meta["partitioner_tag"] = "is_forward"
    _run_backward(builder, schedule.backward, joint, once)
    found += [_copy_of_result(builder, r) for r in results[num_forward_outputs:]]
    for node, value in zip(writes, written, strict=True):
        place = builder.value(node.args[0])
        write = builder.graph.call_function(node.target, (place, value))
        write.meta = dict(node.meta)
    end = builder.graph.output(type(results)(found))  # type: ignore[call-arg]
    end.meta = dict(output.meta)
    _forget_statistics(builder.graph)
    drop_copies_for(builder.graph, lambda user: _run_of(user) is not None)
    module = fx.GraphModule(joint.module, builder.graph)
    module.meta.update(joint.module.meta)
    return module


def _copy_sizes(builder: ReplayBuilder, made: Iterable[fx.Node]) -> None:
    """Copy the sizes that are known once values are made, so that none is saved for its size."""
    left = list(made)
    while left:
        for user in left.pop().users:
            if is_item(user) or is_view(user):
                left.append(user)
            elif is_size(user) and user not in builder.copies:
                with suppress(UnavailableError):  # which is copied after another one
                    builder.value(user)
                    left.append(user)


def _run_backward(
    builder: ReplayBuilder, order: Sequence[fx.Node], joint: Joint, once: Collection[fx.Node]
) -> None:
    runs: dict[fx.Node, int] = {}
    for call, step in zip(order, _steps_of(order, joint), strict=True):
        if call in once or is_size(call):
            continue
        last = next(iter(reversed(builder.graph.nodes)))
        builder.run(call)
        is_recompute = is_forward(call) or call in runs
        runs[call] = runs.get(call, 0) + is_recompute
        _mark_after(last, Run(runs[call], step, call.name))


def _forget_statistics(graph: fx.Graph) -> None:
    """Let recomputed batch norms take no running statistics, which then need not be saved."""
    aten = torch.ops.aten
    full = aten._native_batch_norm_legit_functional.default
    for node in graph.find_nodes(op="call_function", target=full):
        x, weight, bias, _, _, is_training, momentum, eps = node.args
        run = _run_of(node)
        if run is None or not run.number or not is_training:
            continue
        after = [item for item in node.users if item.args[1] not in (0, 1, 2)]
        if not any(item.users for item in after):
            for item in after:
                graph.erase_node(item)
            node.target = aten._native_batch_norm_legit.no_stats
            node.args = (x, weight, bias, is_training, momentum, eps)
            node.meta["val"] = node.meta["val"][:3]


def _is_determined_by_values(joint: Joint, schedule: GraphSchedule) -> bool:
    calls = {*schedule.forward, *schedule.backward}
    nodes = joint.module.graph.nodes
    called = (node for node in nodes if node.op == "call_function" and not is_size(node))
    if any(isinstance(node.meta.get("val"), SYMBOLIC) for node in called):
        return False
    others = (n for n in nodes if n.op == "call_function" and n not in calls and not is_size(n))
    return not any(node.is_impure() and not writes_input(node) for node in others)


def _copy_of_result(builder: ReplayBuilder, result: Any) -> Any:
    return builder.value(result) if isinstance(result, fx.Node) else result


def _steps_of(order: Sequence[fx.Node], joint: Joint) -> list[int]:
    """The step of each run in `order`: how many operators that need cotangents run before."""
    late = {ct for ct in joint.cotangents if ct is not None}
    for node in joint.module.graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    steps, step = [], 0
    for call in order:
        steps.append(step)
        step += call in late
    return steps


def _mark_after(node: fx.Node, run: Run) -> None:
    """Note when nodes after `node` run, and that none moves forward: one mask more were saved."""
    node = node.next
    while node.op != "root":
        node.meta["recompute"] = _torch.MUST_RECOMPUTE
        node.meta["custom"] = {**node.meta.get("custom", {}), _RUN: run}
        node = node.next


def erase_marks(graph: fx.Graph) -> None:
    """Leave no mark but the pass of each node, for a partitioner that obeys the order."""
    for node in graph.nodes:
        node.meta.pop("recompute", None)
        if _run_of(node) is not None:
            node.meta["partitioner_tag"] = "is_backward"


def _run_of(node: fx.Node) -> Run | None:
    run: Run | None = node.meta.get("custom", {}).get(_RUN)
    return run


def may_fuse(one: list[AbstractSet[fx.Node]], other: list[AbstractSet[fx.Node]]) -> bool:
    """Whether two kernels, given by loops, may be one.

    They may not if one recomputes long before its reader, or if the plan frees what one recomputes
    before the other recomputes it again: both results would be alive.
    """
    runs, others = (_find_recomputed(loops) for loops in (one, other))
    if any(runs[call].isdisjoint(others[call]) for call in runs.keys() & others.keys()):
        return False
    steps, other_steps = ([*filter(None, map(_find_step, loops))] for loops in (one, other))
    return not any(
        (is_recompute or other_is_recompute) and abs(step - other_step) > FAR
        for step, is_recompute in steps
        for other_step, other_is_recompute in other_steps
    )


def _find_recomputed(loops: Iterable[AbstractSet[fx.Node]]) -> dict[str, set[int]]:
    """By operator, the recomputations that a kernel runs or reads."""
    found: dict[str, set[int]] = {}
    inside = set().union(*loops)
    read = {i for node in inside for i in node.all_input_nodes}
    for run in map(_run_of, inside | read):
        if run is not None and run.number:
            found.setdefault(run.call, set()).add(run.number)
    return found


def _find_step(nodes: AbstractSet[fx.Node]) -> tuple[int, bool] | None:
    """The step for which a loop runs, and whether it only recomputes."""
    runs = [run for node in nodes if (run := _run_of(node)) is not None]
    if not runs:
        return None
    return max(run.step for run in runs), all(run.number for run in runs)


def merge_within_runs(graph: fx.Graph) -> fx.Graph:
    """A copy with equal operators of a run merged, and those of two runs where that costs less."""
    for node in graph.nodes:
        run = _run_of(node)
        if run is not None and run.number and isinstance(node.target, _torch.OpOverload):
            node.target = _RecomputeRun(node.target, run.number)
    merged = _torch.merge_alike(graph)
    for node in merged.nodes:
        if isinstance(node.target, _RecomputeRun):
            node.target = node.target.op
    _merge_across_runs(merged)
    return merged


def _merge_across_runs(graph: fx.Graph) -> None:
    """Let a recomputed reduction to little be the first one, if the result of that is saved.

    forward     m = mean(x);  y = x - m
    backward    m_again = mean(x_again);  y_again = x_again - m_again;  dx = f(dy, m)
    becomes     y_again = x_again - m

    What one kernel would read beside the result of the run before is that result: both would be
    alive.
    """
    equal: dict[fx.Node, fx.Node] = {}  # for each node the first that computes the same
    first: dict[Any, fx.Node] = {}
    newest: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if not _is_determined_by_arguments(node):
            continue
        leaves, structure = _torch.tree_flatten((node.args, node.kwargs))
        read = [equal.get(i, i) if isinstance(i, fx.Node) else (type(i), repr(i)) for i in leaves]
        before = first.setdefault((node.target, *read, structure), node)
        if before is node:
            continue
        equal[node] = before
        is_item_of_first = is_item(node) and node.args == before.args
        if is_item_of_first or (_reduces_to_little(node) and _is_read_backward(before)):
            node.replace_all_uses_with(before)
            graph.erase_node(node)
        elif _have_one_reader(newest.get(before, before), node):
            node.replace_all_uses_with(newest.get(before, before))
            graph.erase_node(node)
        else:
            newest[before] = node


def _have_one_reader(one: fx.Node, again: fx.Node) -> bool:
    """Whether one kernel would read both results of an operator that is recomputed twice."""
    runs = _run_of(one), _run_of(again)
    if not all(run is not None and run.number for run in runs) or _is_pointwise(again.target):
        return False
    return not _find_inlined(one).isdisjoint(_find_inlined(again))


def _find_inlined(node: fx.Node) -> set[fx.Node]:
    """The pointwise work that is computed of `node` without other operators between."""
    left, found = [node], set[fx.Node]()
    while left:
        for user in left.pop().users:
            if user not in found and (is_view(user) or _is_pointwise(user.target)):
                found.add(user)
                left.append(user)
    return found


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, _torch.OpOverload) and torch.Tag.pointwise in target.tags


def _is_determined_by_arguments(node: fx.Node) -> bool:
    target = node.target
    return is_item(node) or (
        isinstance(target, _torch.OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not node.is_impure()
    )


def _reduces_to_little(node: fx.Node) -> bool:
    run = _run_of(node)
    if run is None or not run.number or not _torch.is_reduction(node.target):
        return False
    values = [n.meta["val"] for n in node.all_input_nodes]
    return _nbytes(node.meta["val"]) <= LITTLE * max(map(_nbytes, values), default=0)


def _is_read_backward(reduction: fx.Node) -> bool:
    """Whether an operator of the backward pass's first run reads it, or as small a value of it."""
    most, left, found = _nbytes(reduction.meta["val"]), [reduction], {reduction}
    while left:
        for user in left.pop().users:
            run = _run_of(user)
            if run is not None and not run.number:
                return True
            is_new = run is None and user.op == "call_function" and user not in found
            if is_new and _nbytes(user.meta["val"]) <= most:
                found.add(user)
                left.append(user)
    return False


def _nbytes(value: Any) -> int:
    tensors = value if isinstance(value, tuple | list) else (value,)
    return sum(t.numel() * t.itemsize for t in tensors if isinstance(t, torch.Tensor))


@dataclass(frozen=True)
class _RecomputeRun:
    """An operator in one of its runs, unequal to itself in another run: nothing merges them."""

    op: Callable[..., Any]
    run: int

    @property
    def __name__(self) -> str:
        return f"{self.op.__name__}_{self.run}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)
