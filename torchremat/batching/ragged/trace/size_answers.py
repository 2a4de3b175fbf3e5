"""Answers to what a trace asks about a size that differs: those of all elements, or none.

The graph of one element serves all, so a question (`n <= 128`) has an answer if all elements give
the same one. The graph then assumes it, and serves the batches in which it holds. Else Python or
PyTorch cannot go on, and the error names the user's line.

Why not by a hint, as PyTorch does: a hint speaks for one size. `table[:n]` of a table of 128 rows
has n rows or 128, and with the hint of a long element it had 128 for each.

PyTorch's own code asks if a size is 0 or 1, to broadcast say. The answer is what holds for greater
ones: the rules are right for elements of any size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.batching.ragged.layouts.ragged_sizes import NAMES_OF_TENSORS, Sizes
from torchremat.batching.ragged.trace.element_errors import find_asking_line
from torchremat.core.source import Source, current_source
from torchremat.errors import ConcretizationError, RaggedError

Answers = dict[Any, Any]
"""By question: a number or truth value if all elements give it, else `MIXED`."""

MIXED = "mixed"


class UnansweredError(BaseException):
    """A question is about lengths that have no numbers, since a trace is around.

    No `Exception`: a user's `except Exception` must not catch it. It ends the trace of the
    element; the trace around answers with a guard of its own, and the element is traced again.
    """

    def __init__(self, question: Any, lengths: "Lengths") -> None:
        super().__init__(str(question))
        self.question = question
        self.lengths = lengths


@dataclass(eq=False)
class Lengths:
    """The lengths of all elements, by the names of the symbols that stand for them."""

    of: Mapping[str, Tensor]
    answers: Answers = field(default_factory=dict)

    @cached_property
    def is_fake(self) -> bool:
        return any(_torch.is_fake(_torch.innermost_tensor(t)) for t in self.of.values())

    def points(self, names: Iterable[str]) -> list[tuple[int, ...]]:
        """The sizes that elements have: one tuple, in the order of `names`, for all that agree."""
        with _torch.isolate():  # the modes of a trace would give these tensors no values
            columns = [_torch.innermost_tensor(self.of[n]).flatten().tolist() for n in names]
        return list(dict.fromkeys(zip(*columns, strict=True)))

    def answer(self, question: Any) -> Any:
        if question not in self.answers:
            if self.is_fake:
                raise UnansweredError(question, self)
            names = sorted(_torch.symbols_of_question(question))
            ask = _compile(question, names)
            found = {_answer_at(ask, point) for point in self.points(names)}
            self.answers[question] = found.pop() if len(found) == 1 else MIXED
        return self.answers[question]

    def find_answer(self, question: Any) -> Any:
        """The answer, also if only the trace around has it."""
        if self.is_fake and question not in self.answers:
            self.ask_trace_around(question)
        return self.answer(question)

    def ask_trace_around(self, question: Any) -> None:
        """Find the answer by operators: the trace around guards it, or has none."""
        self.answers[question] = MIXED
        if not _torch.is_condition(question):
            return
        truth = self.truth(question)
        try:
            if bool(truth.all()):
                self.answers[question] = True
            elif not bool(truth.any()):
                self.answers[question] = False
        except (ConcretizationError, *_torch.DATA_DEPENDENT_ERRORS):
            return  # lengths that are computed have no numbers in any trace

    def truth(self, question: Any) -> Tensor:
        word, parts = _torch.split_condition(question)
        if word == "not":
            return ~self.truth(parts[0])
        if word:
            join = torch.logical_and if word == "and" else torch.logical_or
            truth = self.truth(parts[0])
            for part in parts[1:]:
                truth = join(truth, self.truth(part))
            return truth
        scope = {n: _torch.innermost_tensor(t) for n, t in self.of.items()}
        text = _torch.print_question(question)
        return torch.as_tensor(eval(text, dict(NAMES_OF_TENSORS), scope))


def _answer_at(ask: Callable[..., Any], point: Sequence[int]) -> Any:
    try:
        return ask(*point)
    except ZeroDivisionError:  # of an empty element there is no answer
        return MIXED


def _compile(question: Any, names: Sequence[str]) -> Callable[..., Any]:
    text = f"lambda {', '.join(names)}: {_torch.print_question(question)}"
    return eval(text, dict(_torch.NAMES_IN_SIZES))  # type: ignore[no-any-return]


_squeeze = torch.ops.aten.squeeze


@dataclass(eq=False)
class SizeQuestions:
    """The questions of one trace. `assumed` has the answers that its graph relies on.

    A symbol that is none of `lengths` stands for the value of a tensor, which is known when the
    graph runs: what is assumed of it is checked then.
    """

    lengths: Lengths | None = None
    assumed: Answers = field(default_factory=dict)
    assumed_of_values: Answers = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shapes = _torch.AskingShapeEnv(self.answer, self.prepare)

    def prepare(self, operator: Any, args: Sequence[Any]) -> None:
        """Ask what PyTorch asks as if it did not matter: if a dim is dropped, being of size 1."""
        if operator not in (_squeeze.default, _squeeze.dim, _squeeze.dims):
            return
        x = args[0]
        dims = args[1] if len(args) > 1 else range(x.dim())
        for dim in dims if isinstance(dims, Sequence) else [dims]:
            is_one = x.shape[dim] == 1 if x.dim() else False
            if (
                isinstance(is_one, torch.SymBool)
                and self._find(_torch.question_of(is_one)) is MIXED
            ):
                raise RaggedError(
                    f"squeeze, at {current_source()}, drops a dim whose size differs from element "
                    "to element, where it is 1. Name the dims to drop: x.squeeze(-1)."
                )

    def answer(self, question: Any, fallback: Any) -> Any:
        """The answer; `fallback` stands for an unknown one, unless it is `None`."""
        if question is None:
            raise RaggedError(
                f"an operator of PyTorch, called at {current_source()}, has a result whose size it "
                "cannot say for all elements: it depends on values, or a bound is negative in some "
                "elements and not in others"
            )
        equation = _torch.negate_inequation(question)
        if equation is not None:
            return not self.answer(equation, None if fallback is None else not fallback)
        if question in self.assumed:
            return self.assumed[question]
        source, is_equation = find_asking_line(), _torch.is_equation(question)
        if source is None and fallback is None and self._is_about_layout(question):
            found = self.shapes.answer_by_hint(question)
            return self._answer_equation(question) if found and is_equation else found
        if source is None and is_equation:
            return self._answer_equation(question)
        found = self._find(question, is_needed=fallback is None)
        if found is not MIXED:
            return found
        if source is None and fallback is not None:
            return fallback
        raise self._refuse(question, source)

    def _refuse(self, question: Any, source: Source | None) -> RaggedError:
        if source is not None:
            return RaggedError(
                f"Python needs the value of a size that differs from element to element, at "
                f"{source} (of {question}): an `if`, `int` or `range` of it has one answer in the "
                "graph of all elements. Use operators of tensors: torch.where, torch.arange(n), "
                "x[:k] with a number k."
            )
        if _torch.is_condition(question):
            return RaggedError(
                f"an operator of PyTorch, called at {current_source()}, does one thing for some "
                f"elements and another for others: it asks if {question}, of a size that differs "
                f"from element to element{self._describe_difference(question)}. Use other "
                "operators, or map over a dense batch."
            )
        return RaggedError(
            f"an operator of PyTorch, called at {current_source()}, needs a size as a number that "
            f"differs from element to element ({question}): it has no form for such. Use other "
            "operators, or map over a dense batch."
        )

    def _answer_equation(self, question: Any) -> Any:
        """Two sizes are equal if they are in all elements; what does for unequal ones does else."""
        # of long elements min(n, 1) is 1, not of empty ones: the rules for any size are right
        usual = not _torch.asks_for_zero_or_one(question)
        usual = usual and bool(self.shapes.answer_by_hint(question))
        if (
            self.lengths is None
            or not _torch.symbols_of_question(question) <= self.lengths.of.keys()
        ):
            return usual
        found = self.lengths.answer(question)
        if found in (MIXED, usual):
            return usual
        self.assumed[question] = found
        return found

    def _is_about_layout(self, question: Any) -> bool:
        """Whether only elements of size 0 or 1 would answer otherwise."""
        if _torch.asks_for_zero_or_one(question):
            return True
        if self.shapes.answer_from(0, question) is not None:
            return False  # only a value of a tensor, which may be negative, would answer otherwise
        return self.shapes.answer_from(2, question) is not None

    def _find(self, question: Any, *, is_needed: bool = True) -> Any:
        if question in self.assumed:
            return self.assumed[question]
        names = _torch.symbols_of_question(question)
        if self.lengths is None:
            return MIXED
        if not names <= set(self.lengths.of):
            return self._assume_of_values(question) if is_needed else MIXED
        found = self.lengths.answer(question)
        if found is not MIXED:
            self.assumed[question] = found
        return found

    def _assume_of_values(self, question: Any) -> Any:
        if find_asking_line() is not None or not _torch.is_condition(question):
            return MIXED
        answer = bool(self.shapes.answer_by_hint(question))
        self.assumed_of_values[question] = answer
        return answer

    def _describe_difference(self, question: Any) -> str:
        """Name two elements that give different answers, if sizes have numbers."""
        if self.lengths is None or self.lengths.is_fake:
            return ""
        names = sorted(_torch.symbols_of_question(question))
        ask = _compile(question, names)
        found = {_answer_at(ask, point): point for point in self.lengths.points(names)}
        texts = (
            ", ".join(f"{n} = {x}" for n, x in zip(names, p, strict=True)) for p in found.values()
        )
        return f" (it differs for {' and '.join(list(texts)[:2])})"

    def finish(self) -> None:
        """Forget the batch: later traces of bodies have the answers that the graph assumes."""
        self.lengths = None


def check_assumptions(assumed: Sequence[tuple[Any, Any]], name: str, sizes: Sizes) -> None:
    """Raise if the value that `name` stands for is not what the graph takes it for."""
    for question, answer in assumed:
        names = _torch.symbols_of_question(question)
        if name not in names or not names <= sizes.symbols.keys():
            continue
        given = Lengths({n: sizes.per_symbol(n) for n in names})
        if given.is_fake:
            wrong = f"not all elements answer {answer} to {question}, as an operator needs it"
            _torch.assert_later((given.truth(question) == answer).all(), wrong)
        elif given.answer(question) != answer:
            raise RaggedError(
                f"the value of a tensor ({name}) is used as a size or an index. An operator needs "
                f"that {question} is {answer} in all elements, and in some it is not."
            )
