"""A call whose checks fail: `if not valid.all(): raise ValueError(...)` raises, as in plain Python.

A check ends the run of its graph, before any of the function's writes: they come after it. The
random generators become what they were before, and the function runs as it is.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor, fx

from torchremat import _torch
from torchremat.core.accelerators import DefaultGenerator
from torchremat.graph.nodes import attribute
from torchremat.tracing.tracing import current_tracing


def pass_on(flags: Sequence[Tensor]) -> None:
    """Let the function of the trace in progress have checks too, of a function inside it."""
    tracing = current_tracing()
    checks = None if tracing is None else tracing.checks
    for flag in flags:
        if checks is None or not checks.expect(flag, needed=True):
            assert bool(flag)  # which raises: this trace takes none


def find_generators(module: fx.GraphModule) -> list[Generator | DefaultGenerator]:
    """List the generators that the operators of a graph draw from, also those of graphs inside."""
    found: dict[int | torch.device, Generator | DefaultGenerator] = {}
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for generator in _generators_of(part):
                if isinstance(generator, DefaultGenerator):
                    found.setdefault(generator.device, generator)
                else:
                    found.setdefault(_torch.generator_id(generator), generator)
    return list(found.values())


def _generators_of(module: fx.GraphModule) -> Iterator[Generator | DefaultGenerator]:
    for node in module.graph.nodes:
        if not isinstance(node.target, _torch.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded not in node.target.tags:
            continue
        given = node.kwargs.get("generator")
        if isinstance(given, fx.Node):
            yield attribute(module, str(given.target))
        elif isinstance(given, Generator):
            yield given
        elif isinstance(value := _result_of(node), Tensor):
            yield DefaultGenerator(value.device)


def _result_of(node: fx.Node) -> object:
    """One of the tensors that an operator returns."""
    value = node.meta.get("val")
    return value[0] if isinstance(value, tuple | list) and value else value
