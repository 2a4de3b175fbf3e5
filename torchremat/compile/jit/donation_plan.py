"""Where the storage of a donated input goes: which output of a graph takes it, and how.

    p, g -> sub(p, mul(g, 0.1))      p donated, the output has its size and dtype
    p, g -> sub.out(p, mul(g, 0.1), out=as_strided(p, ...))

Operators that run one after the other write into the storage themselves, by their `out=` variants,
once nobody reads it any more. For a compiler the graph ends in `copy_(p, output)`, as that of a
function that writes to its argument: it fuses the copy into the kernel that computes the output.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.nodes import base_of, is_view, results_of

aten = torch.ops.aten

# operators that return what they read if the other operand is this number
_NEUTRAL: dict[object, int] = {aten.add: 0, aten.sub: 0, aten.mul: 1, aten.div: 1, aten.pow: 1}
# PyTorch tags these as pointwise, but they only copy
_COPIES = {
    aten.clone.default,
    aten._to_copy.default,
    aten.copy.default,
    aten.lift_fresh_copy.default,
}


@dataclass(frozen=True)
class Donation:
    """The use of the donated inputs of a graph.

    Attributes:
        taken: positions of the inputs whose storage is taken: some output has its size and dtype.
            It is freed after the last read where it is not written to.
        written: by the position of an output, that of the taken input whose storage it takes.
        unusable: positions of the other donated inputs.
    """

    taken: tuple[int, ...] = ()
    written: Mapping[int, int] = field(default_factory=dict)
    unusable: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, module: fx.GraphModule, num_outputs: int, donated: Iterable[int], *, fuses: bool
    ) -> "Donation":
        """Match each output with one donated input; `fuses`: a compiler runs the graph."""
        donated = tuple(donated)
        inputs = module.graph.find_nodes(op="placeholder")
        results = results_of(module)
        outputs, residuals = results[:num_outputs], results[num_outputs:]
        bases = [base_of(o) if isinstance(o, fx.Node) else None for o in outputs]
        # the backward pass reads the residuals, whose storage must stay as it is
        saved = {base_of(r) for r in residuals if isinstance(r, fx.Node)}
        candidates = {i: inputs[i] for i in donated if inputs[i] not in saved}
        returned = [i for i, place in candidates.items() if place in bases]
        places = {i: place for i, place in candidates.items() if place not in bases}
        free = _find_free_outputs(outputs, bases)
        readers = _Readers(module.graph)
        may_write = _may_fuse if fuses else _may_write
        written = _match(places, free, lambda place, output: may_write(place, output, readers))
        rest = {i: place for i, place in places.items() if i not in written.values()}
        freed = _match(rest, free, lambda place, output: True)
        taken = tuple(sorted([*returned, *written.values(), *freed.values()]))
        return cls(taken, written, tuple(i for i in donated if i not in taken))


def _find_free_outputs(
    outputs: Sequence[Any], bases: Sequence[fx.Node | None]
) -> dict[int, fx.Node]:
    """The outputs, by position, whose storage the graph allocates for this output alone."""
    return {
        i: output
        for i, (output, base) in enumerate(zip(outputs, bases, strict=True))
        if base is not None and base.op == "call_function" and bases.count(base) == 1
    }


def _match(
    places: Mapping[int, fx.Node],
    free: dict[int, fx.Node],
    suits: Callable[[fx.Node, fx.Node], bool],
) -> dict[int, int]:
    """Give each input, by its outputs, the first of `free` of its size; take that out of `free`."""
    found: dict[int, int] = {}
    for number, place in places.items():
        for i, output in free.items():
            if _same_size(place, output) and suits(place, output):
                found[i] = number
                del free[i]
                break
    return found


class _Readers:
    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op != "placeholder" and not is_view(node):
                for base in {base_of(n) for n in node.all_input_nodes}:
                    self._readers.setdefault(base, []).append(node)

    def of(self, value: fx.Node) -> list[fx.Node]:
        return self._readers.get(value, [])


def _same_size(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return bool(
        x.dtype == y.dtype and x.device == y.device and x.numel() == y.numel() and x.numel() > 0
    )


def _may_write(place: fx.Node, output: fx.Node, readers: _Readers) -> bool:
    writer = base_of(output)
    if out_variant(writer.target) is None or not _fits(place, writer):
        return False
    for reader in readers.of(place):
        if not isinstance(reader.target, _torch.OpOverload):
            return False  # what a body returns may be a view of what it is given
        if readers.order[reader] > readers.order[writer]:
            return False
        if reader is writer and not (
            is_pointwise(writer.target) and _reads_in_place(writer, place)
        ):
            return False
    return True


def _may_fuse(place: fx.Node, output: fx.Node, readers: _Readers) -> bool:
    return is_pointwise(output.target) and not _may_vanish(output) and _has_layout_of(place, output)


def _may_vanish(node: fx.Node) -> bool:
    """Whether a compiler may take `node` for what it reads: x + 0, x * 1.

    A copy at the end would then be of an argument, which another copy may have written to.
    """
    target: object = node.target
    neutral = _NEUTRAL.get(getattr(target, "overloadpacket", target))
    literals = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, int | float)]
    return neutral is not None and len(node.all_input_nodes) == 1 and neutral in literals


def is_pointwise(target: object) -> bool:
    """Whether an operator computes each element from those in its place, and does not only copy.

    >>> [is_pointwise(op) for op in (aten.sub.Tensor, aten.mm.default, aten.clone.default)]
    [True, False, False]
    """
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags and target not in _COPIES


def _reads_in_place(writer: fx.Node, place: fx.Node) -> bool:
    """Whether `writer` reads of `place` just the element that it writes."""
    read = [n for n in writer.all_input_nodes if base_of(n) is place]
    return all(_has_layout_of(n, writer) for n in read) and _has_layout_of(place, writer)


def _has_layout_of(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return bool(x.shape == y.shape and x.stride() == y.stride())


def _fits(place: fx.Node, value: fx.Node) -> bool:
    """Whether `value` as it is laid out takes just the memory of `place`."""
    x, y = place.meta["val"], value.meta["val"]
    if not isinstance(y, Tensor) or not _same_size(place, value):
        return False
    return _has_layout_of(place, value) or bool(x.is_contiguous() and y.is_contiguous())


@cache
def out_variant(target: object) -> _torch.OpOverload | None:
    """The overload of an ATen operator that writes its only result to `out`, if there is one.

    >>> out_variant(aten.mul.Tensor), out_variant(aten.view.default)
    (<OpOverload(op='aten.mul', overload='out')>, None)
    """
    if not isinstance(target, _torch.OpOverload) or target.namespace != "aten":
        return None
    wanted = [(a.name, str(a.type)) for a in _torch.schema_arguments(target)]
    packet = getattr(aten, target.name().partition("::")[2].partition(".")[0])
    for name in packet.overloads():
        overload: _torch.OpOverload = getattr(packet, name)
        arguments = _torch.schema_arguments(overload)
        given = [(a.name, str(a.type)) for a in arguments]
        if given == [*wanted, ("out", "Tensor")] and arguments[-1].kwarg_only:
            return overload
    return None


def write_by_operators(module: fx.GraphModule, written: Mapping[int, int]) -> fx.GraphModule:
    """A copy whose operators write outputs into inputs; `written` has both by position."""
    module = _copy_module(module)
    inputs = module.graph.find_nodes(op="placeholder")
    results = results_of(module)
    for i, number in written.items():
        writer = base_of(results[i])
        value = writer.meta["val"]
        with module.graph.inserting_before(writer):
            place = module.graph.call_function(
                aten.as_strided.default, (inputs[number], list(value.shape), list(value.stride()))
            )
            place.meta["val"] = value
        variant = out_variant(writer.target)
        assert variant is not None
        writer.target = variant
        writer.kwargs = {**writer.kwargs, "out": place}
    module.recompile()
    return module


def write_at_the_end(module: fx.GraphModule, written: Mapping[int, int]) -> fx.GraphModule:
    """A copy that copies outputs into inputs at its end; `written` has both by position."""
    module = _copy_module(module)
    inputs = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    results = results_of(module)
    for i, number in written.items():
        value = results[i]
        assert isinstance(value, fx.Node)
        with module.graph.inserting_before(output):
            copy = module.graph.call_function(aten.copy_.default, (inputs[number], value))
        copy.meta["val"] = inputs[number].meta["val"]
        results = [None if result is value else result for result in results]
    output.args = (tuple(results),)
    module.recompile()
    return module


def _copy_module(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    return copy
