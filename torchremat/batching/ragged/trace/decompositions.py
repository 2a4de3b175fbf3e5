from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.bodies import Body, NotedBody
from torchremat.autodiff.joint import TraceOptions, trace_joint
from torchremat.autodiff.jvp_graph import spec_of
from torchremat.batching.ragged.rules.op_call import RULES
from torchremat.graph.slicing import slice_graph
from torchremat.graph.symbolic_sizes import shapes_in
from torchremat.tracing.modules.module_paths import ModulePaths
from torchremat.tracing.tracing import Tracing, use_symbols

aten = torch.ops.aten


def find_decomposition(op: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The decomposition of an operator on sizes that differ, if it has no rule of its own."""
    if not isinstance(op, _torch.OpOverload) or not _has_symbols(args):
        return None
    name = str(op.overloadpacket)
    if op is aten.native_layer_norm_backward.default:
        return compute_layer_norm_backward
    has_rule = name in RULES or torch.Tag.pointwise in op.tags
    if op is aten.native_layer_norm.default:  # over dims whose size differs there is none
        has_rule = not _has_symbols(args[1])
    return None if has_rule else _torch.decomposition_table().get(op)


class DecomposeMode(_torch.TorchDispatchMode):
    """Traces operators without a rule for ragged sizes as those of their decompositions."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        decomposed = find_decomposition(func, args)
        if decomposed is None:
            return func(*args, **kwargs)
        with self:
            return decomposed(*args, **kwargs)


def decompose_body(module: fx.GraphModule) -> fx.GraphModule:
    """The body was traced out of sight of the mode of the trace around, or it is a derivative."""
    placeholders = module.graph.find_nodes(op="placeholder")
    specs = [spec_of(node) for node in placeholders]
    names = [node.name for node in placeholders]
    options = TraceOptions(with_gradients=False, whole_calls=True)
    shapes = shapes_in(module)
    symbols = use_symbols(shapes) if isinstance(shapes, _torch.AskingShapeEnv) else nullcontext()
    with symbols:
        body = _LoweredBody(NotedBody(module))
        joint, _ = trace_joint(body, specs, names, ModulePaths({}), options)
    outputs = [value for value in joint.outputs if isinstance(value, fx.Node)]
    return slice_graph(joint.module, joint.inputs, outputs)


@dataclass(frozen=True, eq=False)
class _LoweredBody(Body):
    of: Body

    def run(self, tracing: Tracing, inputs: Sequence[Tensor]) -> list[Any]:
        with DecomposeMode():  # type: ignore[no-untyped-call]
            return self.of.run(tracing, inputs)


def compute_layer_norm_backward(
    cotangent: Tensor,
    x: Tensor,
    shape: list[Any],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Autograd sees `mean` and `rstd` as independent of x, so they are recomputed from it.

    n = (x - mean) * rstd;  dn = dy * weight
    dx = rstd * (dn - mean(dn) - n * mean(dn * n));  dweight = sum(dy * n);  dbias = sum(dy)
    """
    inner = list(range(x.dim() - len(shape), x.dim()))
    outer = list(range(x.dim() - len(shape)))
    center = x.mean(inner, keepdim=True)
    variance = ((x - center) ** 2).mean(inner, keepdim=True)
    epsilon = (rstd.detach() ** -2 - variance.detach()).detach()
    scale = (variance + epsilon).rsqrt()
    normal = (x - center) * scale
    inside = cotangent if weight is None else cotangent * weight
    found: list[Tensor | None] = [None, None, None]
    if wanted[0]:
        slope = (inside * normal).mean(inner, keepdim=True)
        found[0] = scale * (inside - inside.mean(inner, keepdim=True) - normal * slope)
    if wanted[1]:
        product = cotangent * normal
        found[1] = product.sum(outer) if outer else product
    if wanted[2]:
        found[2] = cotangent.sum(outer) if outer else cotangent
    return tuple(found)


def _has_symbols(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    if isinstance(value, tuple | list):
        return any(map(_has_symbols, value))
    return isinstance(value, torch.SymInt)
