"""Values of one trace of a function in another, also those that one trace has in fewer bits.

saved by the first      code = encode_bits(mask)
read in the second      mask: an input in the form of `code`, which is decoded there
"""

from collections.abc import Sequence

from torch import fx

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.matching import match_forward
from torchremat.autodiff.rewrites.encoding_ops import is_exact_encoding
from torchremat.autodiff.rewrites.encodings import value_of_encoding
from torchremat.graph.nodes import is_forward


def match_values(
    of: Joint, into: Joint, values: Sequence[fx.Node], *, strict: bool
) -> list[fx.Node | None]:
    """The nodes for `values` of a joint graph in another trace of the function, if there are any.

    For an exact encoding it is the node of the whole value, and `find_codes` finds it. There is
    none if the whole value is among `values`, too.
    """
    whole = [value_of_encoding(v) if is_exact_encoding(v) else v for v in values]
    forward = [node for node in whole if node.op == "placeholder" or is_forward(node)]
    pairs = match_forward(of, into, forward, strict=strict)
    there = {*values}
    return [
        None if node is not value and node in there else pairs.get(node)
        for value, node in zip(values, whole, strict=True)
    ]


def find_codes(values: Sequence[fx.Node], nodes: Sequence[fx.Node | None]) -> dict[int, fx.Node]:
    """The encodings among `values`, by position, for which `match_values` gave whole values."""
    pairs = enumerate(zip(values, nodes, strict=True))
    return {i: v for i, (v, node) in pairs if is_exact_encoding(v) and node not in (v, None)}
