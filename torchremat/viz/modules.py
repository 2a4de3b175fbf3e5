"""Which module the operators of a backward pass belong to.

A trace knows the module of each forward operator; autograd's operators run outside any. Each goes
to the module whose derivative it is part of, as far as what it reads tells:

    t    = transpose(fc.weight)      fc      it reads a parameter of fc
    dx   = mm(dy, t)                 fc      so does this, through a view
    db   = sum(dy)                   fc      it reads what mm reads
    dx_1 = view(dx)                  fc      a view goes with its base
    sum  = add(dx_1, dres)           block   the least module that contains what it joins
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch  # noqa: F401 - for the example
from torch import fx

from torchremat.graph.aliases import is_item, is_view

_PARAMETER = 3
"""A parameter tells more than a value does: that may have come from the module before."""


def backward_modules(nodes: Sequence[fx.Node], known: Mapping[str, str]) -> dict[str, str]:
    """The module of each of `nodes`, by name; `known` are those of the forward pass.

    >>> graph = fx.Graph()
    >>> w, dy = graph.placeholder("w"), graph.placeholder("dy")
    >>> mm = graph.call_function(torch.ops.aten.mm.default, (dy, w))
    >>> sum_1 = graph.call_function(torch.ops.aten.sum.default, (dy,))
    >>> backward_modules([mm, sum_1], {"w": "fc"})
    {'mm': 'fc', 'sum_1': 'fc'}
    """
    found = dict(known)
    for node in nodes:  # what it reads of the forward pass
        module = node.meta.get("module") or _of_what_it_reads(node, known)
        if module is None and _follows(node):
            module = found.get(node.all_input_nodes[0].name)
        if module is not None:
            found[node.name] = module
    for node in nodes:  # what others read beside it
        if node.name not in found and not _follows(node):
            near = Counter(
                found[user.name]
                for source in node.all_input_nodes
                if source.name not in known
                for user in source.users
                if user is not node and user.name in found and len(source.users) <= _FEW
            )
            if len(near) == 1:
                found[node.name] = next(iter(near))
    for node in nodes:  # what it joins
        if node.name not in found:
            around = [found.get(n.name) for n in (*node.all_input_nodes, *node.users)]
            paths = [path for path in around if path is not None]
            inputs = [p for n in node.all_input_nodes if (p := found.get(n.name)) is not None]
            found[node.name] = inputs[0] if _follows(node) and inputs else common(paths)
    return {node.name: found[node.name] for node in nodes}


_FEW = 3
"""A gradient that more operators read is where branches meet, and says nothing of any."""


def _follows(node: fx.Node) -> bool:
    return (is_item(node) or is_view(node)) and len(node.all_input_nodes) == 1


def _of_what_it_reads(node: fx.Node, known: Mapping[str, str]) -> str | None:
    """The module of most of the forward values among what `node` reads, views seen through."""
    votes: Counter[str] = Counter()
    for source in node.all_input_nodes:
        while source.name not in known and is_view(source):
            source = source.all_input_nodes[0]
        if source.name in known:
            votes[known[source.name]] += _PARAMETER if source.op == "placeholder" else 1
    if not votes:
        return None
    best = max(votes.values())
    return max((path for path, count in votes.items() if count == best), key=_depth)


def _depth(path: str) -> tuple[int, str]:
    return path.count(".") + bool(path), path


def common(paths: Sequence[str]) -> str:
    """The least module that contains all of `paths`.

    >>> common(["layers.0.attn", "layers.0.mlp.act"]), common(["a", "b"]), common([])
    ('layers.0', '', '')
    """
    if not paths:
        return ""
    split = [path.split(".") for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
