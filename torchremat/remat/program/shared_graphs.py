"""Compiled graphs that the programs of alike layers share.

Each program decides by its own policy, under the names of its own module. Where two decide alike on
one joint graph they cut the same graphs from it, which are then compiled once:

    layers.0    program, region  ─┐
    layers.1    program, region  ─┴─  joint graph, compiled graphs

A program has a graph module of its own, a twin, since that says which program it belongs to.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.graph.notes import note_graph
from torchremat.remat.program.compiled_graph import CompiledGraph

# Each size has a copy of the joint graph. Chosen by hand, as for one program: beyond it all are
# dropped and made anew.
_MOST_SIZES = 8

Specialized = TypeVar("Specialized")


class SharedGraphs:
    """The compiled graphs of one joint graph, of its variants and of its forms for single sizes."""

    def __init__(self) -> None:
        self.variants: dict[tuple[tuple[bool, ...], bool], Joint] = {}
        """The joint graphs in which some outputs alone have a cotangent, see `Region.joint_for`."""
        self._compiled: dict[Any, CompiledGraph] = {}
        self._specialized: dict[tuple[int, ...], Any] = {}

    def compile_once(
        self, key: Any, make: Callable[[], CompiledGraph], program: Any
    ) -> CompiledGraph:
        """The graph under `key`, as one of `program`; `make` compiles it, if it is not there."""
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = make()
            note_graph(found.module, program=None)  # which would keep its parameters alive
        module = _twin_of(found.module)
        note_graph(module, program=program)
        return replace(found, module=module)

    def at(
        self, sizes: Mapping[Any, int], make: Callable[[], Specialized]
    ) -> tuple[Specialized, "SharedGraphs"]:
        """The result of `make` for `sizes`, made once, and the graphs that go with it."""
        key = tuple(sizes.values())
        if key not in self._specialized:
            if len(self._specialized) >= _MOST_SIZES:
                self._specialized.clear()
            self._specialized[key] = (make(), SharedGraphs())
        found: tuple[Specialized, SharedGraphs] = self._specialized[key]
        return found


def _twin_of(module: fx.GraphModule) -> fx.GraphModule:
    """Another module with the graph and the code of `module`, and notes of its own."""
    twin: fx.GraphModule = object.__new__(type(module))
    vars(twin).update(vars(module))
    twin.meta = dict(module.meta)
    return twin
