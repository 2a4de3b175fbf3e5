"""Truth values of masks that a function branches on while it is traced.

In a trace tensors have no values, so `if x.sum() > 0:` is an error. A question about a mask is
answered all the same: by its value in the call that is traced. The trace then serves the calls in
which the answer is equal, and each later call computes it first:

    if padding_mask.all():      to = attention_mask.to(bool);  all = to.all()    -> False

A mask is a tensor of booleans or integers; one of floating point counts where it is compared for
equality or made boolean. Nothing that has a gradient is one: its values differ at each call.

A random number has no answer, but for a comparison that has the same result for all of them:

    if torch.rand([]) < 0.0:    -> False        (a layer that is dropped with probability 0)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.source import current_source
from torchremat.errors import ConcretizationError
from torchremat.graph.nodes import ancestors, base_of, nodes_read_by
from torchremat.graph.slicing import slice_graph
from torchremat.graph.symbolic_sizes import is_size_from_elsewhere
from torchremat.tracing.dtensors import is_sharded

aten = torch.ops.aten

_IS_IN = Tensor.__contains__
_IS_EQUAL = frozenset((Tensor.equal, torch.equal))
QUESTIONS = frozenset((Tensor.__bool__, Tensor.item, _IS_IN, *_IS_EQUAL))
"""Functions of PyTorch that may ask for the truth value of a mask."""

_EQUALITIES = frozenset((aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor))

_SIZES = frozenset((aten.sym_size.int, aten.sym_numel.default))

# Each call runs the operators of a guard again. Chosen by hand: a mask is cast, compared and
# reduced by a handful of them, and what takes more is a computation.
_MOST_OPERATORS = 32


@dataclass(frozen=True, eq=False)
class ValueGuard:
    """A graph from inputs to one truth value, and its `value` in the call that was traced.

    Without a graph the value is the same in all calls.
    """

    value: bool
    module: fx.GraphModule | None = None
    reads: tuple[int, ...] = ()

    def holds_for(self, inputs: Sequence[Tensor]) -> bool:
        if self.module is None:
            return True
        read = [inputs[i] for i in self.reads]
        return all(map(_has_value, read)) and _run(self.module, read) is self.value


def all_hold(guards: Sequence[ValueGuard], inputs: Sequence[Tensor]) -> bool:
    if not guards:
        return True
    with _isolate():
        return all(guard.holds_for(inputs) for guard in guards)


Evaluate = Callable[[fx.GraphModule, Sequence[Tensor]], bool | None]
"""Returns the truth value that a graph computes from tensors; `None` if it is not known."""


class ValueGuards:
    """The guards of one function, in the order in which it branches.

    The first trace takes truth values from `arguments`, which have values. Those that are tensors
    of a trace around have none, and `evaluate` asks that trace. Traces of derivatives take the
    values of the first trace.
    """

    def __init__(self, arguments: Sequence[Tensor], evaluate: Evaluate | None = None) -> None:
        self._arguments: Sequence[Tensor] | None = arguments
        self._evaluate = evaluate
        self.guards: list[ValueGuard] = []
        self._replayed: Iterator[ValueGuard] = iter(())

    @contextmanager
    def first(self) -> Iterator[None]:
        """Trace the function for the first time in the block; free the arguments after it."""
        try:
            yield
        finally:
            self._arguments = None

    def begin(self) -> None:
        self._replayed = iter(tuple(self.guards))

    def truth_of(
        self,
        node: fx.Node | None,
        root: torch.nn.Module,
        inputs: Sequence[fx.Node],
        captured: Sequence[Tensor],
    ) -> bool | None:
        """The truth value of `node` in the trace in progress; `None` if it has none.

        `inputs` are those of the graph: the arguments, then the inputs for `captured`.
        """
        if self._arguments is None:
            guard = next(self._replayed, None)
            return None if guard is None else guard.value
        if node is None:
            return None
        if _is_below_zero(node):
            guard = ValueGuard(False)
        else:
            tensors = [*self._arguments, *captured]
            guard = self._guard(tensors, inputs, node, fx.GraphModule(root, node.graph))
        if guard is None:
            return None
        self.guards.append(guard)
        return guard.value

    def _guard(
        self,
        tensors: Sequence[Tensor],
        inputs: Sequence[fx.Node],
        node: fx.Node,
        module: fx.GraphModule,
    ) -> ValueGuard | None:
        reads = _inputs_of(node, inputs, tensors)
        if reads is None:
            return None
        read = [tensors[i] for i in reads]
        module = slice_graph(module, [inputs[i] for i in reads], [node])
        if all(map(_has_value, read)):
            with _isolate():
                return ValueGuard(_run(module, read), module if reads else None, reads)
        value = None if self._evaluate is None else self._evaluate(module, read)
        if value is None:
            raise _no_value(next(t for t in read if not _has_value(t)))
        return ValueGuard(value, module, reads)


def _no_value(tensor: Tensor) -> ConcretizationError:
    return ConcretizationError(
        f"the value of a mask of shape {tuple(tensor.shape)} is needed at {current_source()}, but "
        "it is given without one: on the meta device, as a fake tensor, or mapped over. Give it "
        "as a plain tensor (weights may be on the meta device), or do not ask for it: to choose "
        "between two tensors use torch.where; between two functions, torch.cond."
    )


def question(func: object, args: Sequence[Any]) -> Tensor | None:
    """The mask whose truth value is that of `func(*args)`, for `func` in `QUESTIONS`, if any."""
    tensor = args[0]
    if func is _IS_IN:
        return (tensor == args[1]).any() if isinstance(args[1], int | float) else None
    if func in _IS_EQUAL:
        comparable = len(args) == 2 and tensor.shape == args[1].shape
        return (tensor == args[1]).all() if comparable else None
    return tensor if func is Tensor.__bool__ or tensor.dtype is torch.bool else None


def question_of_operator(operator: object, args: Sequence[Any]) -> Tensor | None:
    """The mask whose truth value `operator` returns, if any; PyTorch asks so in C++ (`cov`)."""
    if operator is aten.equal.default:
        a, b = args[:2]
        return (a == b).all() if a.shape == b.shape else None
    return args[0] if args[0].dtype is torch.bool else None


def _is_below_zero(node: fx.Node) -> bool:
    """Whether `node` compares a number drawn from [0, 1) with one that it is never less than."""
    if node.target is not aten.lt.Scalar:
        return False
    drawn, bound = node.args
    draws = isinstance(drawn, fx.Node) and drawn.target is aten.rand.default
    return draws and isinstance(bound, int | float) and bound <= 0


def _inputs_of(
    node: fx.Node, inputs: Sequence[fx.Node], tensors: Sequence[Tensor]
) -> tuple[int, ...] | None:
    """The positions of the `inputs` that a guard for `node` reads; `None` if it has no guard."""
    needed = ancestors([node], reads=nodes_read_by)
    operators = [n for n in needed if n.op == "call_function"]
    if len(operators) > _MOST_OPERATORS or not all(map(_is_pure, operators)):
        return None
    for operator, written in _writes(node.graph):
        base = base_of(written)
        if base in needed and (operator not in needed or base.op == "placeholder"):
            return None
    reads = tuple(i for i, n in enumerate(inputs) if n in needed)
    if len(reads) < sum(n.op == "placeholder" for n in needed):
        return None
    if not all(_may_be_read(inputs[i], tensors[i], needed) for i in reads):
        return None
    return reads


def _may_be_read(placeholder: fx.Node, tensor: Tensor, needed: set[fx.Node]) -> bool:
    """Whether a guard may read an input: its sizes alone, or the values of a mask."""
    if all(user.target in _SIZES for user in needed & placeholder.users.keys()):
        return True
    return _is_mask(placeholder, needed) and not _is_trained(tensor)


def _is_mask(placeholder: fx.Node, needed: set[fx.Node]) -> bool:
    dtype = placeholder.meta["val"].dtype
    is_inexact = dtype.is_floating_point or dtype.is_complex
    return not is_inexact or all(map(_makes_mask, needed & placeholder.users.keys()))


def _makes_mask(node: fx.Node) -> bool:
    is_cast = node.target is aten._to_copy.default and node.kwargs.get("dtype") is torch.bool
    return is_cast or node.target in _EQUALITIES


def _is_pure(node: fx.Node) -> bool:
    return not is_size_from_elsewhere(node) and not (
        isinstance(node.target, _torch.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
    )


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of an operator that writes in place, and the value that it writes to."""
    for node in graph.nodes:
        if isinstance(node.target, _torch.OpOverload):
            arguments = _torch.schema_of(node.target).arguments
            for given, argument in zip(node.args, arguments, strict=False):
                if argument.is_write and isinstance(given, fx.Node):
                    yield node, given


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)


def _has_value(tensor: Tensor) -> bool:
    return not (
        isinstance(tensor, _torch.FakeTensor)
        or tensor.device.type == "meta"
        or _torch.innermost_tensor(tensor) is not tensor
        or is_sharded(tensor)
    )


def _run(module: fx.GraphModule, inputs: Sequence[Tensor]) -> bool:
    (value,) = module.forward(*inputs)
    return bool(value)


@contextmanager
def _isolate() -> Iterator[None]:
    # entering costs more than a guard, so the guards of a trace share one block
    with _torch.isolate(), torch.no_grad():
        yield
