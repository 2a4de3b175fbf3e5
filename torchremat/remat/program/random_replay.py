"""Random numbers replayed: the state of the generator is saved, not the numbers.

    forward     s = generator_state(g);  mask = bernoulli(x, 0.9);  y = mul(x, mask)     -> y, s
    backward    mask = replay_random(s, bernoulli, like x, 0.9);  dx = mul(dy, mask)      -> dx

A generator's state has 5,056 bytes on the CPU and 16 on a GPU, a dropout mask as many as what it
masks. Numbers are replayed from a generator of our own, so that no other stream changes.

Some operators take no generator, and compute with what they draw. So they run again as they did,
while the default generator is in the state that it had:

    forward     s = generator_state();  y, mask = native_dropout(x, 0.1)                  -> s
    backward    y, mask = run_again(s, native_dropout, x, 0.1);  dw = mm(dz, y);  ...

If only the mask is read, an empty tensor does for x.
"""

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.accelerators import (
    get_generator_state,
    has_streams,
    set_generator_state,
)
from torchremat.core.avals import Aval
from torchremat.graph.nodes import call_of, inner_graphs_of, is_checkpoint, is_item, item_index
from torchremat.graph.notes import device_kind_of, notes_of
from torchremat.graph.ops import draws_by_shape, packet_name
from torchremat.graph.symbolic_sizes import literal_size

aten = torch.ops.aten

# The length of `torch.Generator(device).get_state()`. A graph may be planned for CUDA anywhere.
_STATE_NBYTES = {"cpu": 5056, "cuda": 16}


def state_nbytes(node: fx.Node) -> int | None:
    """The bytes of the generator's state that the random value `node` can be replayed from.

    `None` if it cannot be, or if it takes no more bytes itself.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not (_is_drawn_by_shape(node) or is_run_again(node)):
        return None
    nbytes = _state_nbytes_at(device_kind_of(node, value))
    numel = 1
    for size in value.shape:
        numel *= _torch.hint_of(size)
    return nbytes if nbytes is not None and nbytes < numel * value.dtype.itemsize else None


def _is_drawn_by_shape(node: fx.Node) -> bool:
    if is_item(node):
        return (call_of(node).target, item_index(node)) in _MASKS
    op = node.target
    if not isinstance(op, _torch.OpOverload) or not draws_by_shape(op):
        return False
    return with_generator(op) is not None


_MASKS = frozenset({(aten.native_dropout.default, 1)})
"""Results that depend on the shapes of the arguments alone, among others that do not."""


def is_run_again(node: fx.Node) -> bool:
    """Whether `node` is a result of a random operator that needs its arguments to run again."""
    return is_item(node) and can_run_again(call_of(node)) and not _is_drawn_by_shape(node)


def can_run_again(call: fx.Node) -> bool:
    """Whether a random operator with several results gives them again from a generator's state.

    It draws from the default generator of its device: it takes no other, or its body gives none.
    """
    if not isinstance(call.meta.get("val"), tuple | list):
        return False
    device = _find_device(call)
    if device is None or state_nbytes_of(call) == 0:
        return False
    op = call.target
    if isinstance(op, _torch.OpOverload):
        return op.namespace == "aten" and packet_name(op) in _FROM_DEFAULT
    bodies = inner_graphs_of(call)
    return bool(bodies) and not is_checkpoint(call) and _draws_on(bodies, device)


def _draws_on(bodies: Sequence[fx.GraphModule], device: torch.device) -> bool:
    """Whether bodies draw random numbers, all from the default generator of `device`."""
    inner = [node for body in bodies for node in body.graph.nodes]
    if any(inner_graphs_of(node) for node in inner):
        return False
    draws = [
        node
        for node in inner
        if isinstance(node.target, _torch.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
    ]
    return bool(draws) and all(
        _find_device(node) == device and node.kwargs.get("generator") is None for node in draws
    )


def state_nbytes_of(call: fx.Node) -> int:
    """The bytes of the state of the generator that an operator with several results draws from."""
    return _state_nbytes_at(notes_of(call).stands_for or _device_of(call).type) or 0


def state_aval(node: fx.Node) -> Aval:
    nbytes = _state_nbytes_at(device_kind_of(node, node.meta["val"]))
    assert nbytes is not None, node
    return Aval((nbytes,), torch.uint8)


@functools.cache
def _state_nbytes_at(kind: str) -> int | None:
    if kind in _STATE_NBYTES or not has_streams(torch.device(kind)):
        return _STATE_NBYTES.get(kind)
    with _torch.isolate():  # a trace may be in progress
        return torch.Generator(kind).get_state().nbytes


@functools.cache
def takes_generator(op: _torch.OpOverload) -> bool:
    return any(argument.name == "generator" for argument in _torch.schema_arguments(op))


def find_replayed(op: _torch.OpOverload) -> _torch.OpOverload | None:
    """The overload that draws again what the random operator `op` drew, from a generator's state.

    It takes a generator, or is `op` itself, which takes none and draws from the default one.
    """
    if op.namespace != "aten":
        return None
    return op if packet_name(op) in _FROM_DEFAULT else with_generator(op)


# Recurrent layers of cuDNN and MIOpen are not among them: their libraries have states of their own.
_FROM_DEFAULT = frozenset(
    f"aten.{name}"
    for name in (
        "native_dropout", "_scaled_dot_product_flash_attention", "_flash_attention_forward",
        "_scaled_dot_product_efficient_attention", "_efficient_attention_forward",
        "_scaled_dot_product_cudnn_attention", "_cudnn_attention_forward",
    )
)  # fmt: skip
"""Random operators that take no generator, and draw from the default one of their device."""


def with_generator(op: _torch.OpOverload) -> _torch.OpOverload | None:
    if takes_generator(op):
        return op
    packet = getattr(aten, packet_name(op).removeprefix("aten."))
    names = [argument.name for argument in _torch.schema_arguments(op)]
    for overload in packet.overloads():
        other: _torch.OpOverload = getattr(packet, overload)
        others = [argument.name for argument in _torch.schema_arguments(other)]
        if "generator" in others and [name for name in others if name != "generator"] == names:
            return other
    return None


# --- in graphs -----------------------------------------------------------------------------------


def output_generator_states(graph: fx.Graph, positions: Sequence[int]) -> None:
    """Let the outputs at `positions`, random values, be the states that they are drawn from."""
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    states: dict[fx.Node, fx.Node] = {}
    for position in positions:
        drawn = results[position]
        call = call_of(drawn)
        if call not in states:
            generator = call.kwargs.get("generator")
            with graph.inserting_before(call):
                state = graph.call_function(generator_state, (generator, drawn.meta["val"].device))
            state.meta = {**drawn.meta, "val": None}
            states[call] = state
        results[position] = states[call]
    output.args = (tuple(results),)


def replay_from_states(
    graph: fx.Graph, draws: Sequence[fx.Node], placeholders: Sequence[fx.Node]
) -> None:
    """Let `placeholders`, which stood for the values of `draws`, be states they are drawn from."""
    running = _let_run_again(graph, draws, placeholders)
    for draw, state in zip(draws, placeholders, strict=True):
        users = [user for user in state.users if user.target is not run_again]
        if not users:
            continue
        first = next(node for node in graph.nodes if node in users)
        call = call_of(draw)
        runs = running.get(id(call.meta["val"]))
        with graph.inserting_before(first):
            if runs is None or first < runs:
                function, rest = _call_again(graph, call)
                again = graph.call_function(function, (state, *rest))
                again.meta = dict(call.meta)
            else:
                again = runs
            if is_item(draw):
                again = graph.call_function(operator.getitem, (again, item_index(draw)))
                again.meta = dict(draw.meta)
        for user in users:
            user.replace_input_with(state, again)


def _let_run_again(
    graph: fx.Graph, draws: Sequence[fx.Node], placeholders: Sequence[fx.Node]
) -> dict[int, fx.Node]:
    """Let the copies of random operators in `graph` draw from states; by what they are copies of.

    A copy has the metadata of what it was copied from. Of several copies the first is returned.
    """
    states = {id(call_of(d).meta["val"]): s for d, s in zip(draws, placeholders, strict=True)}
    found: dict[int, fx.Node] = {}
    for node in list(graph.nodes):
        key = id(node.meta.get("val"))
        if key not in states or not can_run_again(node):
            continue
        with graph.inserting_before(node):
            runs = graph.call_function(
                run_again, (states[key], node.target, _device_of(node), node.args, node.kwargs)
            )
        runs.meta = dict(node.meta)
        node.replace_all_uses_with(runs)
        graph.erase_node(node)
        found.setdefault(key, runs)
    return found


def _device_of(call: fx.Node) -> torch.device:
    device = _find_device(call)
    assert device is not None, call
    return device


def _find_device(call: fx.Node) -> torch.device | None:
    value = call.meta["val"]
    values = (value,) if isinstance(value, Tensor) else value
    return next((v.device for v in values if isinstance(v, Tensor)), None)


def draws_again(node: fx.Node) -> bool:
    """Whether `node` draws from a saved state, or allocates the tensor that is filled so."""
    call = call_of(node)
    nodes = [call] if call.target in _REPLAYS else list(node.users)
    return bool(nodes) and all(n.target in _REPLAYS for n in nodes)


def _call_again(graph: fx.Graph, draw: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that draws again, and its arguments after the state."""
    assert isinstance(draw.target, _torch.OpOverload)

    def like(node: fx.Node) -> fx.Node:
        """An empty tensor in place of an argument of which only the layout is read."""
        value = node.meta["val"]
        shape, stride = map(literal_size, value.shape), map(literal_size, value.stride())
        made = graph.call_function(
            aten.empty_strided.default,
            (list(shape), list(stride)),
            {"dtype": value.dtype, "device": value.device},
        )
        made.meta = dict(node.meta)
        return made

    args = fx.node.map_arg(draw.args, like)
    kwargs = {k: v for k, v in draw.kwargs.items() if k != "generator"}
    op = find_replayed(draw.target)
    assert op is not None
    return replay_of(op), (op, _device_of(draw), args, kwargs)


# --- at run time ---------------------------------------------------------------------------------


def generator_state(generator: torch.Generator | None, device: torch.device) -> Tensor:
    return get_generator_state(device) if generator is None else generator.get_state()


def draw_now(draw: fx.Node, state: Tensor) -> Tensor:
    """The value of `draw`, which is drawn by shapes, from the state."""
    call = call_of(draw)
    op = call.target
    assert isinstance(op, _torch.OpOverload)

    def like(node: fx.Node) -> Tensor:
        value = node.meta["val"]
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )

    args: Any = fx.node.map_arg(call.args, like)
    kwargs = {k: v for k, v in call.kwargs.items() if k != "generator"}
    again = find_replayed(op)
    assert again is not None
    drawn = replay_of(again)(state, again, _device_of(call), args, kwargs)
    result: Tensor = drawn[item_index(draw)] if is_item(draw) else drawn
    return result


class _Scratch(threading.local):
    """A generator of each device to draw again from, in each thread."""

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}

    def at(self, state: Tensor, device: torch.device) -> torch.Generator:
        generator = self.generators.get(device)
        if generator is None:
            generator = self.generators[device] = torch.Generator(device)
        generator.set_state(state)
        return generator


_scratch = _Scratch()


def replay_random(
    state: Tensor,
    op: Callable[..., Tensor],
    device: torch.device,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """Draw again what `op` drew when its generator was in `state`."""
    return op(*args, **kwargs, generator=_scratch.at(state, device))


def run_again(
    state: Tensor,
    op: Callable[..., Any],
    device: torch.device,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run `op` as it ran when the default generator of `device` was in `state`."""
    before = get_generator_state(device)
    set_generator_state(device, state)
    try:
        return op(*args, **kwargs)
    finally:
        set_generator_state(device, before)


_REPLAYS = (replay_random, run_again)


def replay_of(op: _torch.OpOverload) -> Callable[..., Any]:
    """The function that calls `op`, which `find_replayed` gave, again."""
    return replay_random if takes_generator(op) else run_again
