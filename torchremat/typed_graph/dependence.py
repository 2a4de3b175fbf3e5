"""Dependence on values: operators that read only the shapes of arguments do not count."""

from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from torchremat import _torch
from torchremat.graph.nodes import ancestors, attribute, is_checkpoint, results_of
from torchremat.graph.ops import packet_name

# They read nothing but shape, dtype and device.
_OF_SHAPES = frozenset(
    f"aten.{name}{suffix}"
    for name, suffixes in {
        "zeros": ("_like",), "ones": ("_like",), "full": ("_like",), "empty": ("_like",),
        "rand": ("_like",), "randn": ("_like",), "randint": ("_like",),
        "new_zeros": ("",), "new_ones": ("",), "new_full": ("",), "new_empty": ("", "_strided"),
        "sym_size": ("",), "sym_stride": ("",), "sym_numel": ("",), "is_same_size": ("",),
    }.items()
    for suffix in suffixes
)  # fmt: skip

# Derivatives that are given the input of the forward operator, and read its shape alone.
_SECOND_FOR_SHAPE = frozenset(
    f"aten.{name}_backward"
    for name in (
        "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
        "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
        "replication_pad1d", "replication_pad2d", "replication_pad3d",
    )
)  # fmt: skip


def read_by(node: fx.Node) -> Iterator[fx.Node]:
    if is_checkpoint(node):
        yield from _read_by_body(node)
        return
    name = packet_name(node.target) if isinstance(node.target, _torch.OpOverload) else ""
    if name in _OF_SHAPES:
        return
    skipped: set[int] = set()
    if name in _SECOND_FOR_SHAPE:
        skipped = {1}
    elif name in ("aten.convolution_backward", "aten.grid_sampler_2d_backward",
                  "aten.grid_sampler_3d_backward"):  # fmt: skip
        skipped = _find_masked_positions(node.args)
    args = tuple(value for i, value in enumerate(node.args) if i not in skipped)
    found: dict[fx.Node, None] = {}
    fx.node.map_arg((args, node.kwargs), found.setdefault)
    yield from found


def find_dependents(starts: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    found = set(starts)
    for node in graph.nodes:
        if any(used in found for used in read_by(node)):
            found.add(node)
    return found


def _read_by_body(node: fx.Node) -> Iterator[fx.Node]:
    reference, *operands = node.args
    module = node.graph.owning_module
    assert isinstance(reference, fx.Node) and module is not None
    body = attribute(module, str(reference.target))
    seen = ancestors(results_of(body), reads=read_by)
    inputs = body.graph.find_nodes(op="placeholder")
    for placeholder, operand in zip(inputs, operands, strict=True):
        if placeholder in seen and isinstance(operand, fx.Node):
            yield operand


def _find_masked_positions(args: Sequence[object]) -> set[int]:
    """Input and weight, at 1 and 2, each read for the gradient of the other (by `output_mask`)."""
    mask = args[-1]
    assert isinstance(mask, Sequence)
    return {position for position, wanted in ((1, mask[1]), (2, mask[0])) if not wanted}
