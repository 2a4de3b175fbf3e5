"""A joint graph as a problem in numbers, and schedules of numbers as operators of the graph."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import fx

from torchremat import _torch, config
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.replay_rules import (
    draws_anywhere,
    draws_in_forward,
    reason_not_replayable,
    reason_to_save,
)
from torchremat.autodiff.rewrites.encoding_ops import is_encoding
from torchremat.graph.nodes import (
    ancestors,
    base_of,
    call_of,
    inner_graphs_of,
    is_checkpoint,
    is_forward,
    is_item,
    is_view,
    nodes_read_by,
)
from torchremat.graph.ops import communicates
from torchremat.graph.schedule import GraphSchedule
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.graph.write_forms import writes_into_first
from torchremat.planning.memory.interpreter import is_freed_at_last_reader, peak_inside
from torchremat.planning.memory.storage_bytes import nbytes_of
from torchremat.planning.problem.problem import Operator, Part, Problem, Schedule
from torchremat.planning.problem.replay import Decisions
from torchremat.planning.step.exact_peak import ExactPeaks
from torchremat.planning.step.traced_step import Updates
from torchremat.remat.program.random_replay import (
    can_run_again,
    state_nbytes,
    state_nbytes_of,
)

_NO_UPDATES: Updates = {}


@dataclass(frozen=True, eq=False)
class NumericStep:
    """The forward and the backward pass of a joint graph.

    Attributes:
        problem: the same in numbers.
        calls: the node of each operator; `None` for those in which cotangents arrive, and in which
            gradients are read.
        values: the node of each value; `None` for an output of an operator that nobody takes.
    """

    joint: Joint
    problem: Problem
    calls: tuple[fx.Node | None, ...]
    values: tuple[fx.Node | None, ...]
    written_nbytes: int | None = None
    """`copied_nbytes`, if it is of other sizes than those of the trace."""
    sizes: Sizes | None = None
    """The values of the symbols, if they are not those of the trace."""
    updates: Updates = field(default_factory=dict)
    """Of which inputs updates consume the gradients, each with the bytes that it needs."""

    @classmethod
    def of(
        cls,
        joint: Joint,
        seconds: Callable[[fx.Node], float],
        *,
        host_bytes_per_second: float | None = None,
        updates: Updates = _NO_UPDATES,
    ) -> "NumericStep":
        """The step of `joint`, with `seconds` for the time of each operator."""
        step = _ProblemBuilder(joint, seconds, updates).build()
        if host_bytes_per_second is None:
            return step
        problem = replace(
            step.problem,
            host_bytes_per_second=host_bytes_per_second,
            least_offload=config.least_offload_nbytes,
        )
        return replace(step, problem=problem)

    def at(self, sizes: Sizes, seconds: Callable[[fx.Node], float]) -> "NumericStep":
        """The step with these values of the symbols: other bytes and seconds, nothing else.

        What may be drawn again is as in the graph that runs, which was made for other sizes.
        """
        with _torch.assume_sizes(sizes):
            found = _ProblemBuilder(self.joint, seconds, self.updates).build()
            copied = found.copied_nbytes
        pairs = zip(found.problem.operators, self.problem.operators, strict=True)
        operators = tuple(
            new
            if (new.repeatable, new.draws) == (old.repeatable, old.draws)
            else replace(new, repeatable=old.repeatable, draws=old.draws)
            for new, old in pairs
        )
        problem = replace(
            self.problem,
            operators=operators,
            nbytes=found.problem.nbytes,
            backward_constant=found.problem.backward_constant,
        )
        return replace(self, problem=problem, written_nbytes=copied, sizes=sizes)

    @property
    def plain(self) -> Decisions:
        """Without rematerialisation: save every value of the forward pass that is read later.

        Of a value of which only an encoding is read later, that is saved in its place.
        """
        late = {v for op in self.problem.operators if op.part is Part.BACKWARD for v in op.reads}
        late |= {
            v
            for op, call in zip(self.problem.operators, self.calls, strict=True)
            if call is not None and not is_forward(call) and not is_encoding(call)
            for v in op.reads
        }
        return Decisions(
            frozenset(
                v
                for v, node in enumerate(self.values)
                if v in late
                and node is not None
                and (is_forward(call_of(node)) or is_encoding(node))
            )
        )

    @cached_property
    def exact_peaks(self) -> ExactPeaks:
        return ExactPeaks(self.joint, self.sizes, has_updates=bool(self.updates))

    @property
    def copied_nbytes(self) -> int:
        """The bytes of copies that a second run of operators may need.

        They are of inputs that are written to, and of the states that loops draw again from.
        """
        if self.written_nbytes is not None:
            return self.written_nbytes
        again = [o for o, op in enumerate(self.problem.operators) if op.repeatable]
        return self._count_written(again) + self._count_states(again)

    def count_copied(self, schedule: Schedule) -> int:
        """The bytes of written inputs, and of states, that `schedule` reads again."""
        again = [o for o in schedule.backward if self.problem.operators[o].part is Part.FORWARD]
        if again and self.joint.mutations and self.sizes is not None:
            return self.copied_nbytes
        written = self._count_written(again) if again and self.joint.mutations else 0
        return written + self._count_states(again)

    def _count_states(self, operators: Iterable[int]) -> int:
        calls = (self.calls[o] for o in {*operators})
        drawing = (c for c in calls if c is not None and inner_graphs_of(c) and can_run_again(c))
        return sum(map(state_nbytes_of, drawing))

    def _count_written(self, operators: Iterable[int]) -> int:
        inputs = self.joint.inputs
        written = {i for i, _ in self.joint.mutations} & self.find_inputs_read(operators)
        return sum(nbytes_of(inputs[i], inputs[i].meta["val"]) for i in written)

    def find_inputs_read(self, operators: Iterable[int]) -> frozenset[int]:
        """The positions of the inputs that `operators` read."""
        calls = (self.calls[o] for o in operators)
        read = {base_of(n) for call in calls if call is not None for n in nodes_read_by(call)}
        return frozenset(i for i, node in enumerate(self.joint.inputs) if node in read)

    def graph_schedule(self, schedule: Schedule) -> GraphSchedule:
        # an output is there for the backward pass, which must be handed it
        read = {v for o in schedule.backward for v in self.problem.operators[o].reads}
        saved = (self.values[v] for v in {*schedule.saved, *(self.problem.outputs & read)})
        return GraphSchedule(
            frozenset(node for node in saved if node is not None),
            self._nodes(schedule.forward),
            self._nodes(schedule.backward),
            frozenset(node for v in schedule.offloaded if (node := self.values[v]) is not None),
        )

    def _nodes(self, operators: Iterable[int]) -> tuple[fx.Node, ...]:
        return tuple(node for o in operators if (node := self.calls[o]) is not None)


class _Update(NamedTuple):
    """The update of an input, and the operators of the backward pass that read the input."""

    number: int
    gradient: fx.Node
    readers: Sequence[fx.Node]


class _ProblemBuilder:
    def __init__(self, joint: Joint, seconds: Callable[[fx.Node], float], updates: Updates) -> None:
        self.joint = joint
        self.seconds = seconds
        self.updates = updates
        self.operators: list[Operator] = []
        self.calls: list[fx.Node | None] = []
        self.nbytes: list[int] = []
        self.values: list[fx.Node | None] = []
        self.places: dict[fx.Node, int] = {}
        self.made_by: dict[int, int] = {}
        """The number of the operator that makes each value."""
        self.updated: dict[int, list[fx.Node]] = {}
        """The inputs that are updated, with the operators after which that may be."""
        self.numbers: dict[tuple[fx.Node, int], int] = {}
        """The value that each output of each call is."""

    def build(self) -> NumericStep:
        joint = self.joint
        parts = _parts(joint)
        calls = [n for n in joint.module.graph.nodes if n in parts]
        for node in calls:
            if parts[node] is Part.FORWARD:
                self._add(node, Part.FORWARD)
        self._add_arrival()
        updates = self._find_updates(parts)
        for node in calls:
            if parts[node] is not Part.FORWARD:
                self._add(node, parts[node])
                self._add_updates(updates.get(node, ()))
        self._count_updates()
        gradients = list(self._values_of(self._lasting_gradients()))
        inside = max((n for i, n in self.updates.items() if i not in self.updated), default=0)
        self._add_own(Operator(tuple(gradients), (), 0.0, Part.BACKWARD, nbytes_inside=inside))
        late = {v for op in self.operators if op.part is Part.BACKWARD for v in op.writes}
        problem = Problem(
            tuple(self.operators),
            tuple(self.nbytes),
            outputs=frozenset(self._values_of(o for o in joint.outputs if isinstance(o, fx.Node))),
            gradients=frozenset(gradients) & late,
            written=frozenset(self._values_of(value for _, value in joint.mutations)),
            backward_constant=sum(
                _nbytes_of_cotangent(ct)
                for ct in _list_cotangents(joint)
                if not is_freed_at_last_reader(ct)
            ),
        )
        found = NumericStep(joint, problem, tuple(self.calls), tuple(self.values))
        return replace(found, updates=self.updates)

    def _find_updates(self, parts: Mapping[fx.Node, Part]) -> dict[fx.Node, list[_Update]]:
        """The updates, by the last operator that they wait for, in the order of the trace."""
        place = {node: i for i, node in enumerate(self.joint.module.graph.nodes)}
        backward = [node for node, part in parts.items() if part is Part.BACKWARD]
        readers = _find_readers(backward, {self.joint.inputs[i] for i in self.updates})
        in_parts = {i for i, _ in self.joint.parts}
        found: dict[fx.Node, list[_Update]] = {}
        for i in self.updates.keys() - in_parts:
            gradient = self.joint.gradients[i]
            if not isinstance(gradient, fx.Node):
                continue
            made_by = call_of(base_of(gradient))
            if parts.get(made_by) is Part.BACKWARD:
                before = readers.get(self.joint.inputs[i], [])
                last = max([made_by, *before], key=place.__getitem__)
                found.setdefault(last, []).append(_Update(i, gradient, before))
        return found

    def _add_updates(self, updates: Sequence[_Update]) -> None:
        """Add updates, which wait for the gradient and for all that reads the input.

        For the latter there are values without bytes, so that nothing is alive longer.
        """
        for update in updates:
            reads = [*self._values_of([update.gradient])]
            for call in update.readers:
                operator, token = self.operators[self.places[call]], self._add_value(0)
                writes = (*operator.writes, token)
                self.operators[self.places[call]] = replace(operator, writes=writes)
                reads.append(token)
            inside = self.updates[update.number]
            self._add_own(Operator(tuple(reads), (), 0.0, Part.BACKWARD, nbytes_inside=inside))
            self.updated[update.number] = [call_of(base_of(update.gradient)), *update.readers[-1:]]

    def _count_updates(self) -> None:
        """Count the bytes of updates in the operators that these wait for, which may be the last.

        An update does not wait longer, though a schedule may say so. Of what such an operator
        reads, values that nobody else reads are freed before the update.
        """
        readers = Counter(v for operator in self.operators for v in operator.reads)
        for number, calls in self.updated.items():
            for call in calls:
                operator = self.operators[self.places[call]]
                freed = sum(
                    self.nbytes[v] for v in operator.reads if readers[v] == 1 and self._is_late(v)
                )
                needed = max(operator.nbytes_inside, self.updates[number] - freed)
                self.operators[self.places[call]] = replace(operator, nbytes_inside=needed)

    def _is_late(self, value: int) -> bool:
        made_by = self.made_by.get(value)
        return made_by is None or self.operators[made_by].part is Part.BACKWARD

    def _add_value(self, nbytes: int, node: fx.Node | None = None) -> int:
        self.nbytes.append(nbytes)
        self.values.append(node)
        return len(self.nbytes) - 1

    def _lasting_gradients(self) -> list[fx.Node]:
        consumed = [self.joint.gradients[i] for i in self.updated]
        lasting = [g for i, g in enumerate(self.joint.gradients) if i not in self.updated]
        return [g for g in self.joint.returned_gradients if g not in consumed or g in lasting]

    def _add_own(self, operator: Operator) -> None:
        """Add an operator that is no node of the graph."""
        self.operators.append(operator)
        self.calls.append(None)

    def _add_arrival(self) -> None:
        """Let the backward pass begin with an operator that makes the cotangents."""
        arrived = [ct for ct in _list_cotangents(self.joint) if is_freed_at_last_reader(ct)]
        for ct in arrived:
            self.numbers[ct, 0] = self._add_value(_nbytes_of_cotangent(ct))
        writes = tuple(self.numbers[ct, 0] for ct in arrived)
        self._add_own(Operator((), writes, 0.0, Part.BACKWARD, repeatable=False))

    def _add(self, call: fx.Node, part: Part) -> None:
        reads = tuple(self._values_of(nodes_read_by(call)))
        draws = any(reason_not_replayable(value) is not None for value in _result_nodes(call))
        again = draws and state_nbytes(call) is not None
        runs_again = again or (not self.joint.by_compiler and can_run_again(call))
        once = (draws and not runs_again) or reason_to_save(call) is not None
        writes = []
        for index, value in enumerate(_outputs_of(call)):
            if isinstance(value, torch.Tensor):
                nbytes, item = nbytes_of(call, value, index), _output_item(call, index)
                self.numbers[call, index] = self._add_value(nbytes, item)
                self.made_by[self.numbers[call, index]] = len(self.operators)
                writes.append(self.numbers[call, index])
        self.operators.append(
            Operator(
                reads,
                tuple(writes),
                self.seconds(call),
                part,
                repeatable=not once,
                draws=again,
                nbytes_inside=_nbytes_inside(call, sum(self.nbytes[v] for v in writes)),
                in_order=draws_anywhere(call) or communicates(call.target, call.kwargs),
            )
        )
        self.places[call] = len(self.calls)
        self.calls.append(call)

    def _values_of(self, nodes: Iterable[fx.Node]) -> Iterator[int]:
        """The values in whose memory `nodes` lie, each once; inputs and constants are none."""
        seen = set()
        for node in nodes:
            base = base_of(node)
            index = base.args[1] if is_item(base) else 0
            number = self.numbers.get((call_of(base), index))  # type: ignore[arg-type]
            if number is not None and number not in seen:
                seen.add(number)
                yield number


def _find_readers(calls: Iterable[fx.Node], inputs: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The calls that read each of `inputs`."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for call in calls:
        for value in inputs.intersection(map(base_of, nodes_read_by(call))):
            found.setdefault(value, []).append(call)
    return found


def cotangent_nbytes(joint: Joint) -> int:
    """The bytes of the gradients that autograd hands to the backward pass."""
    return sum(map(_nbytes_of_cotangent, _list_cotangents(joint)))


def _list_cotangents(joint: Joint) -> list[fx.Node]:
    return [ct for ct in joint.cotangents if ct is not None]


def _nbytes_of_cotangent(ct: fx.Node) -> int:
    return nbytes_of(ct, ct.meta["val"])


def _nbytes_inside(call: fx.Node, written: int) -> int:
    """The bytes that graphs inside `call` need besides the `written` bytes of its results."""
    peak = peak_inside(call)
    makes_results = is_checkpoint(call) or str(call.target) == "cond"
    return max(0, peak - written) if makes_results else peak


def _result_nodes(call: fx.Node) -> list[fx.Node]:
    return [user for user in call.users if is_item(user)] or [call]


def _parts(joint: Joint) -> dict[fx.Node, Part]:
    """When each operator runs, of those that run at all; views are none."""
    graph = joint.module.graph
    written = [value for _, value in joint.mutations]
    roots = [*joint.outputs, *written, *filter(draws_in_forward, graph.nodes)]
    forward = ancestors(roots, reads=nodes_read_by)
    backward = ancestors(joint.returned_gradients, reads=nodes_read_by)
    late = {ct for ct in joint.cotangents if ct is not None} | _find_workspaces(graph)
    parts = {}
    for node in graph.nodes:
        if any(n in late for n in nodes_read_by(node)):
            late.add(node)
        if node.op != "call_function" or is_item(node) or is_view(node):
            continue
        if node in forward:
            parts[node] = Part.FORWARD
        elif node in backward:
            parts[node] = Part.BACKWARD if node in late else Part.EITHER_PASS
    return parts


def _find_workspaces(graph: fx.Graph) -> set[fx.Node]:
    """The memory that the user's own backward pass writes to.

    Who reads it runs where it was traced, before the next write, also without a cotangent. Run when
    a gradient is wanted, it would need a copy of what was there.
    """
    written = [n for n in graph.nodes if n.args and writes_into_first(n) and not is_forward(n)]
    return {lying for n in written for lying in (n, *map(base_of, n.all_input_nodes[:1]))}


def _outputs_of(call: fx.Node) -> Sequence[object]:
    value = call.meta.get("val")
    return value if isinstance(value, tuple | list) else (value,)


def _output_item(call: fx.Node, index: int) -> fx.Node | None:
    if not isinstance(call.meta.get("val"), tuple | list):
        return call
    return next((u for u in call.users if is_item(u) and u.args[1] == index), None)
