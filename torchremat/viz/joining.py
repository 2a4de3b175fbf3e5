"""Several steps as one: modules that ran by themselves, as parts of the model they are in."""

from collections.abc import Sequence
from dataclasses import replace

from torchremat.remat.scopes import below
from torchremat.viz.picture import Value

_NAMED = ("input", "parameter", "constant")


def joined(parts: Sequence[tuple[str, Sequence[Value]]]) -> tuple[Value, ...]:
    """The values of all, each within the module of that name.

    The forward passes come first, then the backward passes, those of the last module before.

    >>> def value(name, phase, *reads):
    ...     return Value(name, "sin", "aten.sin.default", phase, "saved", "", "", "", 4, None, "",
    ...                  reads)
    >>> step = [value("x", "forward"), value("dx", "backward", 0)]
    >>> [(v.name, v.module, v.reads) for v in joined([("a", step), ("b", step)])]
    [('a:x', 'a', ()), ('b:x', 'b', ()), ('b:dx', 'b', (1,)), ('a:dx', 'a', (0,))]
    """
    order = [
        (part, i)
        for phase, numbers in (
            ("forward", range(len(parts))),
            ("backward", reversed(range(len(parts)))),
        )
        for part in numbers
        for i, value in enumerate(parts[part][1])
        if value.phase == phase
    ]
    places = {which: place for place, which in enumerate(order)}
    found = []
    for part, i in order:
        name, values = parts[part]
        reads = tuple(places[part, read] for read in values[i].reads)
        value = within(name, values[i])
        found.append(replace(value, name=f"{name}:{value.name}", reads=reads))
    return tuple(found)


def within(name: str, value: Value) -> Value:
    """`value` as one of the module `name`, from which it is told."""
    label = below(name, value.label) if value.kind in _NAMED and not value.op else value.label
    return replace(value, module=below(name, value.module), label=label)
