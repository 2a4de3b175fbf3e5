"""A call on a tape as a problem in numbers: its operators forward, autograd's nodes backward.

    tape        h = mm(x, w)    y = sin(h), saves h       z = sum(y)
    autograd    MmBackward      SinBackward, reads h      SumBackward
    problem     0 forward   writes 0 (h)         3 backward  writes 2 (dz, of the caller)
                1 forward   reads 0, writes 1    4 backward  reads 2: dy is dz, expanded
                2 forward   reads 1, writes z    5 backward  reads 0, 2, writes dh
                                                 6 backward  reads dh, writes dw, a gradient

The sizes of cotangents are those that autograd expects. Its nodes run from the last made to the
first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torchremat import _torch
from torchremat.planning.problem.problem import Operator, Part, Problem
from torchremat.remat.tape.contents import Content, Entry, Read
from torchremat.remat.tape.limited_calls import TapeRecord

# Nodes whose cotangents lie in the memory of the one that they take, if they are as large.
_PASSING = frozenset({
    "Add", "Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Squeeze", "T", "ToCopy",
    "Transpose", "UnsafeView", "Unsqueeze", "View",
})  # fmt: skip
# The same of the first cotangent alone.
_PASSING_FIRST = frozenset({"IndexAdd", "ScatterAdd", "Sub"})
# Nodes whose cotangents are views of the one that they take, whatever their sizes.
_VIEWING = frozenset({"Cat", "Stack", "Sum"})
# Nodes that are one kernel: beside what they read and write they need no memory, or little. These
# and the next are as measured with a large tensor for each.
_ONE_KERNEL = frozenset({
    "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D", "Addmm",
    "AvgPool2D", "AvgPool3D", "Baddbmm", "Bmm", "Celu", "Chunk", "ConstantPadNd", "Convolution",
    "CtcLoss", "Elu", "Embedding", "EmbeddingBag", "Exp", "Fill", "Flip", "Gelu", "Glu",
    "GridSampler2D", "GridSampler3D", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh",
    "HuberLoss", "LeakyRelu", "Log", "LogSigmoid", "LogSoftmax", "MaxPool2DWithIndices",
    "MaxPool3DWithIndices", "Mean", "Mish", "Mm", "MseLoss", "Mv", "NativeBatchNorm",
    "NativeDropout", "NativeGroupNorm", "NativeLayerNorm", "Neg", "NllLoss", "ReflectionPad1D",
    "ReflectionPad2D", "Relu", "ReplicationPad1D", "ReplicationPad2D", "Roll", "Select", "Sigmoid",
    "Silu", "Slice", "SmoothL1Loss", "Softmax", "Softplus", "Softshrink", "Split",
    "SplitWithSizes", "Tanh", "Threshold", "Tril", "Triu", "Unfold", "UpsampleBicubic2D",
    "UpsampleBilinear2D", "UpsampleLinear1D", "UpsampleNearest1D", "UpsampleNearest2D",
    "UpsampleTrilinear3D",
    "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention",
    "ScaledDotProductEfficientAttention",
})  # fmt: skip
# Nodes that make one value besides, as large as the largest that they read or write.
_TWO_KERNELS = frozenset({
    "Abs", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Cosh", "Cummax", "Cummin", "Exp2",
    "Expm1", "Gather", "Index", "IndexPut", "IndexSelect", "Log10", "Log1P", "Log2", "Mul",
    "NanToNum", "PreluKernel", "Sin", "Sinh", "SliceScatter", "Sort", "Sqrt", "Topk", "Where",
})  # fmt: skip
# The values that other nodes make besides: the derivative of a power makes two.
_MOST_BESIDES = 2


@dataclass(frozen=True, eq=False)
class TapeStep:
    """A step in numbers.

    Attributes:
        problem: its operators and values.
        contents: the content that each value is; `None` for cotangents.
        numbers: the value of each content, by its `id`.
    """

    problem: Problem
    contents: tuple[Content | None, ...]
    numbers: dict[int, int]

    def contents_of(self, values: Iterable[int]) -> frozenset[int]:
        """The contents that values are, by their `id`; cotangents are none."""
        contents = (self.contents[v] for v in values)
        return frozenset(id(content) for content in contents if content is not None)

    @classmethod
    def of(cls, record: TapeRecord, seconds_of: Callable[[Entry], float]) -> "TapeStep":
        return _NumbersOfTape(record, seconds_of).build()

    @classmethod
    def of_forward(
        cls, made: Sequence[Content], seconds_of: Callable[[Entry], float]
    ) -> "TapeStep":
        """The operators alone of a call that still runs, which made these contents."""
        return cls.of(TapeRecord(made, (), (), (), 0, frozenset()), seconds_of)


@dataclass(eq=False)
class _NumbersOfTape:
    record: TapeRecord
    seconds_of: Callable[[Entry], float]
    operators: list[Operator] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    contents: list[Content | None] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    gradients: set[int] = field(default_factory=set)
    buffers: dict[tuple[Any, int], int] = field(default_factory=dict)

    def build(self) -> TapeStep:
        self._add_forward()
        self._add_backward()
        outputs = frozenset(
            self.numbers[id(c)] for c in self.record.outputs if id(c) in self.numbers
        )
        problem = Problem(
            tuple(self.operators),
            tuple(self.nbytes),
            outputs=outputs,
            gradients=frozenset(self.gradients),
        )
        return TapeStep(problem, tuple(self.contents), self.numbers)

    def _new_value(self, nbytes: int, content: Content | None = None) -> int:
        self.nbytes.append(nbytes)
        self.contents.append(content)
        return len(self.nbytes) - 1

    # --- forward ---------------------------------------------------------------------------------

    def _add_forward(self) -> None:
        for entry, contents in _by_operator(self.record.made):
            for content in contents:
                self.numbers[id(content)] = self._new_value(content.nbytes, content)
            writes = tuple(self.numbers[id(content)] for content in contents)
            if entry is None:
                self.operators.append(Operator((), writes, 0.0, Part.FORWARD, repeatable=False))
                continue
            reads = dict.fromkeys(self.numbers[id(c)] for c in entry.reads if id(c) in self.numbers)
            once = any(content.is_forced or content.is_undefined for content in contents)
            # what is written in place lies where the value lay before, which is read
            written = [given.content for given, _ in entry.writes if isinstance(given, Read)]
            in_place = sum(content.nbytes for content in written if id(content) in self.numbers)
            self.operators.append(
                Operator(
                    tuple(reads),
                    writes,
                    self.seconds_of(entry),
                    Part.FORWARD,
                    repeatable=not once,
                    nbytes_inside=-in_place,
                )
            )

    # --- backward --------------------------------------------------------------------------------

    def _add_backward(self) -> None:
        first = self.record.first_node
        given = []
        for root, index in self.record.roots:
            place = (root, index)
            if place not in self.buffers and _torch.node_number_of(root) >= first:
                self.buffers[place] = self._new_value(_nbytes_at(root, index))
                given.append(self.buffers[place])
        self.gradients.update(given)  # whoever calls backward has them to its end
        self.operators.append(Operator((), tuple(given), 0.0, Part.BACKWARD, repeatable=False))
        saved: dict[int, list[int]] = {}
        for packed in self.record.packed:
            number = self.numbers.get(id(packed.content))
            if number is not None:
                saved.setdefault(packed.node, []).append(number)
        roots = [root for root, _ in self.record.roots]
        for node in _list_nodes(roots, first):
            self._add_node(node, saved.get(_torch.node_number_of(node), ()))

    def _add_node(self, node: Any, saved: Iterable[int]) -> None:
        taken = [
            self.buffers[node, i]
            for i in range(len(_torch.cotangents_of(node)))
            if (node, i) in self.buffers
        ]
        if not taken:  # nothing asks for its gradients
            return
        name = node_name(node)
        largest = max(self.nbytes[v] for v in taken)
        writes: list[int] = []
        sums: list[tuple[Any, int, int]] = []
        for position, (other, index) in enumerate(node.next_functions):
            if other is None:
                continue
            nbytes = _nbytes_at(other, index)
            largest = max(largest, nbytes)
            made = self._find_passed(name, position, taken, nbytes)
            if made is None:
                made = self._new_value(nbytes)
                writes.append(made)
            if (other, index) in self.buffers:
                sums.append((other, index, made))
            else:
                self._put(other, index, made)
        reads = dict.fromkeys([*saved, *taken])
        self._add(tuple(reads), tuple(writes), besides_of(name) * largest)
        for other, index, made in sums:
            old = self.buffers[other, index]
            total = self._new_value(
                self.nbytes[old]
            )  # autograd adds in place where it alone has it
            self._add((old, made), (total,))
            self._put(other, index, total)

    def _find_passed(self, name: str, position: int, taken: list[int], nbytes: int) -> int | None:
        if len(taken) > 1:
            return None
        is_as_large = nbytes == self.nbytes[taken[0]]
        passes = name in _PASSING or (name in _PASSING_FIRST and not position)
        if name in _VIEWING or (passes and is_as_large):
            return taken[0]
        return None

    def _put(self, node: Any, index: int, made: int) -> None:
        old = self.buffers.get((node, index))
        self.buffers[node, index] = made
        if _torch.node_number_of(node) < self.record.first_node or _is_leaf(node):
            self.gradients.add(made)
            self.gradients.discard(-1 if old is None else old)

    def _add(self, reads: tuple[int, ...], writes: tuple[int, ...], inside: int = 0) -> None:
        self.operators.append(Operator(reads, writes, 0.0, Part.BACKWARD, nbytes_inside=inside))


def _by_operator(made: Iterable[Content]) -> Iterator[tuple[Entry | None, list[Content]]]:
    """The contents that each operator made; those of no operator that can run again are alone."""
    group: list[Content] = []
    for content in made:
        if group and (content.maker is None or content.maker is not group[0].maker):
            yield group[0].maker, group
            group = []
        group.append(content)
    if group:
        yield group[0].maker, group


def _list_nodes(roots: list[Any], first: int) -> list[Any]:
    """The nodes of a call in the order in which a backward pass runs them."""
    found: dict[Any, int] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is None or node in found:
            continue
        number = _torch.node_number_of(node)
        if number >= first and not _is_leaf(node):
            found[node] = number
            stack += [other for other, _ in node.next_functions]
    return sorted(found, key=lambda node: -found[node])


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def node_name(node: Any) -> str:
    return str(node.name()).rpartition("::")[2].partition("Backward")[0]


def besides_of(name: str) -> int:
    if name in _TWO_KERNELS:
        return 1
    is_small = name in _PASSING | _PASSING_FIRST | _VIEWING | _ONE_KERNEL
    return 0 if is_small else _MOST_BESIDES


def _nbytes_at(node: Any, index: int) -> int:
    taken = _torch.cotangents_of(node)
    if index >= len(taken):
        return 0
    shape, dtype = taken[index]
    return prod(shape) * dtype.itemsize
