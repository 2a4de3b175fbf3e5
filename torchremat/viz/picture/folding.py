"""Parts of modules with many operators of their own, so that the parts can be folded."""

from collections import Counter
from collections.abc import Sequence

from torchremat.viz.picture.picture import DrawnValue

# A module with more operators of its own is divided into parts. Chosen by hand.
LONG = 150

# The number of forward operators of a part. Chosen by hand.
PART = 50

_NOT_COMPUTED = ("input", "parameter", "constant")


def groups_of(values: Sequence[DrawnValue]) -> list[str]:
    """For each value the path of its module, with a part of it where the module is long.

    A backward operator is in the last part of the forward values that it reads. If it reads none,
    it is in the first part of its backward values: gradients flow from late parts to early ones.

    >>> def value(name, phase, *reads):
    ...     facts = "sin", "aten.sin.default", phase, "temporary", "", "", "", 4, None, ""
    ...     return DrawnValue(name, *facts, reads)
    >>> chain = [value(str(i), "forward", *range(max(0, i - 1), i)) for i in range(200)]
    >>> groups = groups_of([*chain, value("g", "backward", 120)])
    >>> groups[0], groups[199], groups[200]
    ('operators 1-50', 'operators 151-200', 'operators 101-150')
    """
    counts = Counter(v.module for v in values if v.phase == "forward" and _is_operator(v))
    places = Counter[str]()
    parts: list[int | None] = []
    for value in values:
        part = None
        if counts[value.module] > LONG and value.kind not in _NOT_COMPUTED:
            if value.phase == "forward":
                part = places[value.module] // PART
                places[value.module] += _is_operator(value)
            else:
                part = _part_of_backward(value, values, parts)
        parts.append(part)
    return [
        value.module if part is None else _path(value.module, part, counts[value.module])
        for value, part in zip(values, parts, strict=True)
    ]


def _is_operator(value: DrawnValue) -> bool:
    return value.kind not in (*_NOT_COMPUTED, "view")


def _part_of_backward(
    value: DrawnValue, values: Sequence[DrawnValue], parts: Sequence[int | None]
) -> int | None:
    found: dict[str, list[int]] = {"forward": [], "backward": []}
    for read in value.reads:
        part = parts[read]
        if part is not None and values[read].module == value.module:
            found[values[read].phase].append(part)
    return max(found["forward"]) if found["forward"] else min(found["backward"], default=None)


def _path(module: str, part: int, count: int) -> str:
    last = min((part + 1) * PART, count)
    name = f"operators {min(part * PART + 1, last)}-{last}"
    return f"{module}.{name}" if module else name
