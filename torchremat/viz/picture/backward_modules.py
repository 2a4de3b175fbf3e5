"""The modules of the operators of a backward pass.

A trace notes the module of each forward operator; autograd's operators run outside any. Each goes
to the module whose derivative it is part of, by the values that it reads:

    t    = transpose(fc.weight)      fc      it reads a parameter of fc
    dx   = mm(dy, t)                 fc      so does this, through a view
    db   = sum(dy)                   fc      it reads what mm reads
    dx_1 = view(dx)                  fc      a view goes with its base
    zero = scalar_tensor(0)          fc      it goes with what reads it
    all  = add(dx_1, dres)           block   the least module that contains what it joins
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

# The votes of a parameter, against one of any other value: a value may come from the module before.
_PARAMETER = 3

# A gradient with more readers belongs to several branches, and determines the module of none.
_FEW = 3


@dataclass(frozen=True)
class Operators:
    """Operators by name, in the order in which they run.

    Attributes:
        reads: the names of the values that each reads.
        views: those in the memory of the one value that they read, and its items.
        modules: the modules that the trace noted.
    """

    reads: Mapping[str, Sequence[str]]
    views: frozenset[str]
    parameters: frozenset[str]
    modules: Mapping[str, str]

    @cached_property
    def readers(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for name, reads in self.reads.items():
            for read in reads:
                found.setdefault(read, []).append(name)
        return found

    @cached_property
    def unknown(self) -> list[str]:
        return [name for name in self.reads if name not in self.modules]


def backward_modules(operators: Operators) -> dict[str, str]:
    """The module of each operator, by name: noted by the trace, or found by four rules in turn.

    >>> reads = {"w": [], "dy": [], "mm": ["dy", "w"], "sum": ["dy"]}
    >>> backward_modules(Operators(reads, frozenset(), frozenset(["w"]), {"w": "fc"}))
    {'w': 'fc', 'mm': 'fc', 'sum': 'fc', 'dy': 'fc'}
    """
    found = dict(operators.modules)
    for step in (_vote_by_reads, _find_of_co_readers, _find_of_readers, _find_of_joined):
        for name in operators.unknown:
            if name not in found:
                module = step(operators, name, found)
                if module is not None:
                    found[name] = module
    return {name: found.get(name, "") for name in (*found, *operators.unknown)}


def _vote_by_reads(operators: Operators, name: str, found: Mapping[str, str]) -> str | None:
    """The module of most of the forward values that it reads; of a view its base counts."""
    reads = operators.reads[name]
    votes: Counter[str] = Counter()
    for read in reads:
        source = read
        while source not in operators.modules and source in operators.views:
            (source,) = operators.reads[source]
        if source in operators.modules:
            weight = _PARAMETER if source in operators.parameters else 1
            votes[operators.modules[source]] += weight
    if votes:
        most = max(votes.values())
        return max((path for path, count in votes.items() if count == most), key=_depth)
    return found.get(reads[0]) if name in operators.views else None


def _find_of_co_readers(operators: Operators, name: str, found: Mapping[str, str]) -> str | None:
    near = {
        found[reader]
        for read in operators.reads[name]
        if read not in operators.modules and len(operators.readers[read]) <= _FEW
        for reader in operators.readers[read]
        if reader in found
    }
    return near.pop() if len(near) == 1 and name not in operators.views else None


def _find_of_readers(operators: Operators, name: str, found: Mapping[str, str]) -> str | None:
    if operators.reads[name]:
        return None
    return _common_of(operators.readers.get(name, ()), found)


def _find_of_joined(operators: Operators, name: str, found: Mapping[str, str]) -> str | None:
    reads = operators.reads[name]
    if name in operators.views and reads[0] in found:
        return found[reads[0]]
    return _common_of((*reads, *operators.readers.get(name, ())), found)


def _common_of(names: Iterable[str], found: Mapping[str, str]) -> str | None:
    paths = [found[name] for name in names if name in found]
    return common_module(paths) if paths else None


def _depth(path: str) -> tuple[int, str]:
    return path.count(".") + bool(path), path


def common_module(paths: Sequence[str]) -> str:
    """The least module that contains all of `paths`.

    >>> common_module(["layers.0.attn", "layers.0.mlp.act"]), common_module(["a", "b"])
    ('layers.0', '')
    """
    if not paths:
        return ""
    shared = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
