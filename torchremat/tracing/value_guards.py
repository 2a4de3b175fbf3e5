"""What a library asks of the values of its arguments while it is traced.

In a trace tensors have no values, and `if mask.all():` is an error. Models of some libraries ask so
whether a padding mask masks anything, to choose a faster kernel where it does not. They are
answered as the call is that is being traced, and each later call is asked the same:

    if padding_mask.all():      to = attention_mask.to(bool);  all = to.all()    -> False
                                the trace serves the calls in which this is False

Whether to skip a layer they ask with a random number, which has no answer unless there is but one:

    if torch.rand([]) < 0.0:    -> False
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.source import current_module, current_source
from torchremat.errors import ConcretizationError
from torchremat.graph.nodes import ancestors, base_of, nodes_read_by
from torchremat.graph.slicing import slice_graph
from torchremat.tracing.dtensors import is_spread

_LIBRARIES = frozenset(("transformers", "transformers_modules"))
_IS_IN = Tensor.__contains__
_ASKS = frozenset((Tensor.__bool__, Tensor.item, _IS_IN))
_MOST_OPERATORS = 32
"""A question takes so many operators at most: it is asked again at each call."""


@dataclass(frozen=True, eq=False)
class Question:
    """A graph from inputs to one truth value, and the value that a trace took for granted.

    Without a graph there is but one answer.
    """

    answer: bool
    module: fx.GraphModule | None = None
    reads: tuple[int, ...] = ()

    def has_answer_of(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the answer is the same for the `inputs` of another call."""
        if self.module is None:
            return True
        read = [inputs[i] for i in self.reads]
        return all(map(_has_value, read)) and _value(self.module, read) is self.answer


Asked = Callable[[fx.GraphModule, Sequence[Tensor]], bool | None]
"""What a graph computes of tensors, as a truth value; `None` if it cannot be told."""


class Questions:
    """The questions of one function, in the order in which it asks.

    The first trace is answered from `arguments`, tensors with values, or tensors of a trace around,
    which is asked (`outer`); traces of its derivatives, in which nothing has a value, get the same
    answers.
    """

    def __init__(self, arguments: Sequence[Tensor], outer: Asked | None = None) -> None:
        self._arguments: Sequence[Tensor] | None = arguments
        self._outer = outer
        self.asked: list[Question] = []
        self._again: Iterator[Question] = iter(())

    @contextmanager
    def first(self) -> Iterator[None]:
        """In the block the function is traced first; the arguments are let go of after it."""
        try:
            yield
        finally:
            self._arguments = None

    def begin(self) -> None:
        """The function begins to run."""
        self._again = iter(tuple(self.asked))

    def answer(
        self,
        node: fx.Node | None,
        root: torch.nn.Module,
        inputs: Sequence[fx.Node],
        captured: Sequence[Tensor],
    ) -> bool | None:
        """The value of `node` in the trace in progress as a truth value; `None` if it has none.

        `inputs` are those of the graph: the arguments, then what is `captured`.
        """
        if self._arguments is None:
            known = next(self._again, None)
            return None if known is None else known.answer
        if node is None:
            return None
        if _is_below_zero(node):
            found: Question | None = Question(False)
        else:
            tensors = [*self._arguments, *captured]
            found = self._asked_of(tensors, inputs, node, fx.GraphModule(root, node.graph))
        if found is None:
            return None
        self.asked.append(found)
        return found.answer

    def _asked_of(
        self,
        tensors: Sequence[Tensor],
        inputs: Sequence[fx.Node],
        node: fx.Node,
        module: fx.GraphModule,
    ) -> Question | None:
        reads = _inputs_of(node, inputs)
        if reads is None or any(map(_is_trained, read := [tensors[i] for i in reads])):
            return None
        module = slice_graph(module, [inputs[i] for i in reads], [node])
        if all(map(_has_value, read)):
            return Question(_value(module, read), module if reads else None, reads)
        answer = None if self._outer is None else self._outer(module, read)
        if answer is None:
            raise _no_value(next(t for t in read if not _has_value(t)))
        return Question(answer, module, reads)


def _no_value(tensor: Tensor) -> ConcretizationError:
    return ConcretizationError(
        f"{current_source()} asks for the value of an argument of shape {tuple(tensor.shape)}, "
        "whether it masks anything say, but it is given without one: on the meta device, as a fake "
        "tensor, or mapped over. Give it as a plain tensor; the model itself may be on the meta "
        "device. Or ask the library for attention that does not: attn_implementation='eager'"
    )


def question(func: object, args: Sequence[object]) -> Tensor | None:
    """The tensor whose truth value `func(*args)` asks for, in a library that is answered."""
    if func not in _ASKS or current_module().partition(".")[0] not in _LIBRARIES:
        return None
    tensor = args[0]
    assert isinstance(tensor, Tensor)
    if func is _IS_IN:
        return (tensor == args[1]).any() if isinstance(args[1], int | float) else None
    return tensor if func is Tensor.__bool__ or tensor.dtype is torch.bool else None


def _is_below_zero(node: fx.Node) -> bool:
    """Whether `node` asks if a number drawn from [0, 1) is less than 0 or less."""
    if node.target is not torch.ops.aten.lt.Scalar:
        return False
    drawn, bound = node.args
    draws = isinstance(drawn, fx.Node) and drawn.target is torch.ops.aten.rand.default
    return draws and isinstance(bound, int | float) and bound <= 0


def _inputs_of(node: fx.Node, inputs: Sequence[fx.Node]) -> tuple[int, ...] | None:
    """The positions of the `inputs` that a small computation reads; `None` if it is none."""
    needed = ancestors([node], reads=nodes_read_by)
    operators = [n for n in needed if n.op == "call_function"]
    if len(operators) > _MOST_OPERATORS or not all(map(_is_pure, operators)):
        return None
    for operator, written in _writes(node.graph):
        base = base_of(written)
        if base in needed and (operator not in needed or base.op == "placeholder"):
            return None
    if any(n.op == "placeholder" and n not in inputs for n in needed):
        return None
    return tuple(i for i, n in enumerate(inputs) if n in needed)


def _is_pure(node: fx.Node) -> bool:
    """Whether an operator gives the same each time."""
    return not (
        isinstance(node.target, _torch.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
    )


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The operators that write in place, each with what it is given to write to."""
    for node in graph.nodes:
        if isinstance(node.target, _torch.OpOverload) and node.target._schema.is_mutable:
            for given, argument in zip(node.args, node.target._schema.arguments, strict=False):
                if argument.is_write and isinstance(given, fx.Node):
                    yield node, given


def _is_trained(tensor: Tensor) -> bool:
    """Whether `tensor` is a weight or comes from one, and no mask or the like."""
    return tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)


def _has_value(tensor: Tensor) -> bool:
    return not (
        isinstance(tensor, _torch.FakeTensor)
        or tensor.device.type == "meta"
        or _torch.innermost_tensor(tensor) is not tensor
        or is_spread(tensor)
    )


def _value(module: fx.GraphModule, inputs: Sequence[Tensor]) -> bool:
    with _torch.isolated_from_surroundings(), torch.no_grad():
        (value,) = module(*inputs)
        return bool(value)
