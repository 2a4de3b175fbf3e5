"""The values that a plan keeps, in a compiler's trace of the same function.

Such a trace has other inputs in another order, and a few operators that are written otherwise; so a
plan is not replayed step by step. Values are known by their operator, shape, dtype and number.

    plan        mm f32[8,4], the first of its kind      gelu f32[8,4], the second
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.planning.fingerprints import lines_of


def kept_elsewhere(
    lines: Sequence[str], saved: Sequence[int], joint: Joint
) -> list[fx.Node] | None:
    """The nodes of `joint` for the positions `saved` in a graph of `lines`.

    `None` if another function was traced: if a kind of value is kept of which there are more here,
    or fewer.
    """
    nodes = list(joint.module.graph.nodes)
    ours = list(_numbered(lines_of(joint.module.graph)))
    theirs = list(_numbered(lines))
    wanted = {theirs[i] for i in saved}
    kinds = {kind for kind, _ in wanted}
    count = Counter(kind for kind, _ in ours if kind in kinds)
    if count != Counter(kind for kind, _ in theirs if kind in kinds):
        return None
    return [node for node, numbered in zip(nodes, ours, strict=False) if numbered in wanted]


def _numbered(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Of each line the kind of value that it computes, and how many of that kind came before."""
    seen: Counter[str] = Counter()
    for line in lines:
        kind = _kind(line, lines)
        yield kind, seen[kind]
        seen[kind] += 1


_ITEM = re.compile(r"getitem\(%(\d+), (\d+)\)")


def _kind(line: str, lines: Sequence[str]) -> str:
    """The operator and what comes out of it; of one of several outputs also which.

    >>> _kind("aten.mm.default(%0, %1) -> f32[2,3]", [])
    'aten.mm.default -> f32[2,3]'
    >>> _kind("getitem(%0, 1) -> i64[2]", ["aten.topk.default(%7, 2) -> f32[2], i64[2]"])
    'aten.topk.default -> f32[2], i64[2] / 1'
    """
    item = _ITEM.match(line)
    if item is not None:
        return f"{_kind(lines[int(item[1])], lines)} / {item[2]}"
    operator, _, rest = line.partition("(")
    return f"{operator} -> {rest.rpartition(' -> ')[2]}"
