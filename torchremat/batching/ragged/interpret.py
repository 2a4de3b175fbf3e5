import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from torchremat.batching.ragged.layouts.layouts import Padded, Shared, Value
from torchremat.batching.ragged.layouts.ragged_sizes import RaggedSize
from torchremat.batching.ragged.rules import (  # noqa: F401  (they register rules)
    indexing,
    own_ops,
    slices,
    structural,
)
from torchremat.batching.ragged.rules.attention import attention
from torchremat.batching.ragged.rules.fallback_loop import run_one_by_one
from torchremat.batching.ragged.rules.op_call import (
    RULES,
    Batch,
    RaggedCall,
    check_sizes,
    is_collective,
    run_dense,
)
from torchremat.batching.ragged.rules.pointwise import map_entries, pointwise
from torchremat.batching.ragged.trace.size_answers import check_assumptions
from torchremat.errors import RaggedError
from torchremat.graph.nodes import inner_graphs_of
from torchremat.graph.notes import notes_of
from torchremat.graph.symbolic_sizes import SYMBOLIC, Size
from torchremat.policies.checkpoint_name import name_p
from torchremat.remat.op.remat_op import remat_p
from torchremat.tracing.no_grad_op import no_grad_p

BodyRunner = Callable[[fx.GraphModule, Sequence[Value], Batch], Sequence[Any]]


def interpret(
    module: fx.GraphModule,
    inputs: Sequence[Value],
    batch: Batch,
    outputs: Sequence[Any],
    items: Mapping[str, fx.Node],
    run_body: BodyRunner,
) -> list[Any]:
    """A value is freed after the last node that reads it."""
    env: dict[fx.Node, Any] = {}
    left = iter(inputs)
    named: dict[fx.Node, list[str]] = {}
    for name, node in items.items():
        named.setdefault(node, []).append(name)
    wanted = [o for o in outputs if isinstance(o, fx.Node)]
    last, needed = _find_last_uses(module.graph, [*wanted, *items.values()])
    for node in module.graph.nodes:
        if node.op == "output":
            break
        if node not in needed:
            if node.op == "placeholder":
                next(left)
            continue
        env[node] = (
            next(left) if node.op == "placeholder" else _run_node(node, env, batch, run_body)
        )
        for name in named.get(node, ()):
            _bind(batch, name, env[node])
        for used in last.get(node, ()):
            env.pop(used, None)
    return [_read_output(o, env, batch) for o in outputs]


def _find_last_uses(
    graph: fx.Graph, outputs: Sequence[fx.Node]
) -> tuple[dict[fx.Node, list[fx.Node]], set[fx.Node]]:
    needed = set(outputs)
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if node in needed or (not node.users and _is_check(node)):
            for used in node.all_input_nodes:
                if used not in needed:
                    last.setdefault(node, []).append(used)
            needed |= {node, *node.all_input_nodes}
    return last, needed


_CHECKS = ("aten._linalg_check_errors", "aten._assert_async", "aten._assert_scalar")


def _is_check(node: fx.Node) -> bool:
    """Whether an operator has no result, and only raises if something is wrong."""
    return str(getattr(node.target, "overloadpacket", "")) in _CHECKS


def _read_output(output: Any, env: dict[fx.Node, Any], batch: Batch) -> Any:
    if isinstance(output, fx.Node):
        return env[output]
    if isinstance(output, Size):
        if batch.sizes.varies(output):
            return Padded(batch.sizes.compute_numbers(output), ())
        return batch.sizes.of(output)
    return output


def _bind(batch: Batch, name: str, value: Value) -> None:
    if isinstance(value, Shared):
        batch.sizes.symbols[name] = int(value.data)
        check_assumptions(batch.assumed, name, batch.sizes)
        return
    assert isinstance(value, Padded)
    if value.rank:
        value = Padded(value.data.reshape(-1), ())
    extent = RaggedSize(name, value.data.to(torch.int64))
    batch.sizes.symbols[name] = batch.sizes.extents[name] = extent
    check_assumptions(batch.assumed, name, batch.sizes)


def _run_node(node: fx.Node, env: dict[fx.Node, Any], batch: Batch, run_body: BodyRunner) -> Any:
    if node.op == "get_attr":
        value = getattr(node.graph.owning_module, str(node.target))
        return Shared(value) if isinstance(value, Tensor) else value
    args: Any = fx.node.map_arg(node.args, env.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, env.__getitem__)
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target is remat_p:
        (body,) = inner_graphs_of(node)
        return list(run_body(body, args[1:], batch))
    target: Any = node.target
    if target is no_grad_p or node.target is name_p:
        return map_entries(batch, lambda x: target(x, **kwargs), [args[0]])
    call = RaggedCall(node.target, args, kwargs, node.meta.get("val"), batch, notes_of(node).source)
    if isinstance(call.result, SYMBOLIC):
        raise RaggedError(f"{node.target} at {call.source} gives a number that no graph holds")
    return run_call(call)


def run_call(call: RaggedCall) -> Any:
    """Run one operator on ragged values, and check the sizes of its result."""
    result = _run_by_rule(call)
    check_sizes(call, result)
    return result


def _run_by_rule(call: RaggedCall) -> Any:
    if call.name == "aten._assert_async":
        return call.op(call.args[0].data.all(), *call.args[1:])
    if not call.is_ragged and not _has_ragged_result(call):
        if call.op is attention:
            call = replace(call, op=_plain_attention)
        return run_dense(call)
    if is_collective(call):
        raise RaggedError(
            f"{call.name} over {call.kwargs['axis_name']!r}, at {call.source}, is given a tensor "
            "whose size differs from element to element: these cannot be combined. Reduce "
            "each element first (x.sum(), x.amax()), or pad."
        )
    rule = RULES.get(call.name)
    if rule is None and torch.Tag.pointwise in getattr(call.op, "tags", ()):
        rule = pointwise
    result = NotImplemented if rule is None else rule(call)
    return run_one_by_one(call) if result is NotImplemented else result


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)


def _has_ragged_result(call: RaggedCall) -> bool:
    results = call.result if isinstance(call.result, tuple | list) else [call.result]
    return any(
        isinstance(size, RaggedSize)
        for r in results
        if isinstance(r, Tensor)
        for size in call.sizes_of(r)
    )
