"""Random numbers replayed: the state of the generator is saved, not the numbers.

    forward     s = generator_state(g);  mask = bernoulli(x, 0.9);  y = mul(x, mask)     -> y, s
    backward    mask = replay_random(s, bernoulli, like x, 0.9);  dx = mul(dy, mask)      -> dx

A generator's state has 5,056 bytes on the CPU and 16 on a GPU, a dropout mask as many as what it
masks. Numbers are replayed from a generator of our own, so that no other stream changes.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.accelerators import get_generator_state, has_streams
from torchremat.core.avals import Aval
from torchremat.graph.nodes import call_of, is_item
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
    if is_item(node) or not isinstance(node.target, _torch.OpOverload):
        return None
    if not isinstance(value, Tensor) or not draws_by_shape(node.target):
        return None
    if with_generator(node.target) is None:
        return None
    nbytes = _state_nbytes_at(value.device.type)
    numel = 1
    for size in value.shape:
        numel *= _torch.hint_of(size)
    return nbytes if nbytes is not None and nbytes < numel * value.dtype.itemsize else None


def state_aval(node: fx.Node) -> Aval:
    nbytes = _state_nbytes_at(node.meta["val"].device.type)
    assert nbytes is not None, node
    return Aval((nbytes,), torch.uint8)


@functools.cache
def _state_nbytes_at(kind: str) -> int | None:
    if kind in _STATE_NBYTES or not has_streams(torch.device(kind)):
        return _STATE_NBYTES.get(kind)
    return torch.Generator(kind).get_state().nbytes


def with_generator(op: _torch.OpOverload) -> _torch.OpOverload | None:
    if any(argument.name == "generator" for argument in _torch.schema_arguments(op)):
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
    for position in positions:
        drawn = results[position]
        generator = call_of(drawn).kwargs.get("generator")
        with graph.inserting_before(call_of(drawn)):
            state = graph.call_function(generator_state, (generator, drawn.meta["val"].device))
        state.meta = {**drawn.meta, "val": None}
        results[position] = state
    output.args = (tuple(results),)


def replay_from_states(
    graph: fx.Graph, draws: Sequence[fx.Node], placeholders: Sequence[fx.Node]
) -> None:
    """Let `placeholders`, which stood for the values of `draws`, be states they are drawn from."""
    for draw, state in zip(draws, placeholders, strict=True):
        users = list(state.users)
        if not users:
            continue
        first = next(node for node in graph.nodes if node in state.users)
        with graph.inserting_before(first):
            again = graph.call_function(replay_random, (state, *_call_again(graph, draw)))
        again.meta = dict(draw.meta)
        for user in users:
            user.replace_input_with(state, again)


def draws_again(node: fx.Node) -> bool:
    """Whether `node` draws from a saved state, or allocates the tensor that is filled so."""
    nodes = [node] if node.target is replay_random else list(node.users)
    return bool(nodes) and all(n.target is replay_random for n in nodes)


def _call_again(graph: fx.Graph, draw: fx.Node) -> tuple[Any, ...]:
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
    return (with_generator(draw.target), draw.meta["val"].device, args, kwargs)


# --- at run time ---------------------------------------------------------------------------------


def generator_state(generator: torch.Generator | None, device: torch.device) -> Tensor:
    return get_generator_state(device) if generator is None else generator.get_state()


def draw_now(draw: fx.Node, state: Tensor) -> Tensor:
    op = draw.target
    assert isinstance(op, _torch.OpOverload)

    def like(node: fx.Node) -> Tensor:
        value = node.meta["val"]
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )

    args: Any = fx.node.map_arg(draw.args, like)
    kwargs = {k: v for k, v in draw.kwargs.items() if k != "generator"}
    again = with_generator(op)
    assert again is not None
    return replay_random(state, again, draw.meta["val"].device, args, kwargs)


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
