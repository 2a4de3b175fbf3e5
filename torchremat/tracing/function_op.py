"""`function_p`: a user's `autograd.Function` as one operator of a graph.

A graph of ATen operators would lose the derivative that the class defines. So the call becomes a
node, whose body is a module that calls the class again, with its own derivatives of every kind:

    y = Clip.apply(x, 1.0)          y = function_p[Clip(*, 1.0)] x

The operators that the class runs inside are recorded too, and dropped. They stay only where its
`backward`, in the same trace, reads values that its `forward` saved.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from torchremat import _torch
from torchremat.core.trees import HOLE
from torchremat.errors import EffectError
from torchremat.graph.notes import note, notes_of

if TYPE_CHECKING:
    from torchremat.tracing.tracing import Tracing


class FunctionCall(nn.Module):
    """Calls an `autograd.Function`, with given arguments where no tensor was."""

    def __init__(self, function: type[torch.autograd.Function], args: tuple[Any, ...]) -> None:
        super().__init__()
        self.function = function
        self.args = args
        self.draws_random = False

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        """The results for other tensors, always as a tuple."""
        left = iter(tensors)
        args = _map_tree(lambda value: next(left) if value is HOLE else value, self.args)
        result = self.function.apply(*args)
        return result if isinstance(result, tuple) else (result,)

    def __repr__(self) -> str:
        return f"{self.function.__name__}({', '.join(map(repr, self.args))})"


class FunctionOp(_torch.HigherOrderOperator):
    """`function_p(body, *tensors)`: runs a `FunctionCall`; its derivatives are the class's own."""

    def __init__(self) -> None:
        super().__init__("function_p")  # type: ignore[no-untyped-call]

    def __call__(self, body: FunctionCall, /, *tensors: Tensor) -> tuple[Any, ...]:
        """Call the class; functionalisation alone, which cannot look inside, sees the operator."""
        if _torch.innermost_transform() == _torch.TransformType.Functionalize:
            return _torch.dispatch_call(self, body, *tensors)  # type: ignore[no-any-return]
        return body(*tensors)  # type: ignore[no-any-return]


function_p = FunctionOp()
_torch.register_simple_rules(function_p, lambda body, *tensors: body(*tensors))


@dataclass(frozen=True, eq=False)
class FunctionCalls:
    """Writes each call of an `autograd.Function` into a trace as one `function_p`."""

    tracing: "Tracing"

    def __call__(
        self,
        function: type[torch.autograd.Function],
        args: tuple[Any, ...],
        apply: Callable[..., Any],
    ) -> Any:
        tracing = self.tracing
        last = next(iter(reversed(tracing.graph.nodes)), None)
        result = apply(*args)
        inside = list(_nodes_after(tracing.graph, last))
        for node in inside:
            note(node, is_inside_function=True)
        outputs = result if isinstance(result, tuple) else (result,)
        tensors: list[Tensor] = []
        body = FunctionCall(function, _map_tree(lambda value: _make_hole(value, tensors), args))
        if any(output is tensor for output in outputs for tensor in tensors):
            raise EffectError(
                f"{function.__qualname__} writes to a tensor that it is given (mark_dirty), which "
                "a graph cannot hold together with its derivative. Let it return a new tensor."
            )
        body.draws_random = any(map(_draws, inside))
        if any(isinstance(output, Tensor) for output in outputs):
            self._record(body, tensors, outputs)
        return result

    def _record(self, body: FunctionCall, tensors: list[Tensor], outputs: tuple[Any, ...]) -> None:
        tracer = self.tracing.tracer
        name = tracer.get_fresh_qualname("function_")
        tracer.root.register_module(name, body)
        reference = tracer.create_proxy("get_attr", name, (), {})
        operands = [_torch.proxy_of(tensor, tracer) for tensor in tensors]
        assert all(o is not None for o in operands), "an argument of a function is not tracked"
        call = tracer.create_proxy("call_function", function_p, (reference, *operands), {})
        _torch.track(outputs, call, tracer)


def drop_inside(graph: fx.Graph) -> None:
    """Take out what functions ran inside, unless something outside reads it.

    Raises `EffectError` where that is a random operator, which would then draw twice.
    """
    for node in reversed(list(graph.nodes)):
        if not notes_of(node).is_inside_function or node.op == "placeholder":
            continue
        if not node.users:
            graph.erase_node(node)
        elif _draws(node):
            raise EffectError(
                f"{node.target} draws random numbers inside an autograd.Function, and a backward "
                f"pass in the same graph reads them (from {notes_of(node).source}). Draw them "
                "outside, and pass them in."
            )


def _draws(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, _torch.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags


def _nodes_after(graph: fx.Graph, last: fx.Node | None) -> Iterator[fx.Node]:
    for node in reversed(graph.nodes):
        if node is last:
            return
        yield node


def _make_hole(value: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensors.append(value)
    return HOLE


def _map_tree(mapping: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_map_tree(mapping, item) for item in value)
    if type(value) is dict:
        return {key: _map_tree(mapping, item) for key, item in value.items()}
    return mapping(value)
