"""The graphs of one `torch.compile`, between graph breaks, under one budget.

    step 1    each graph is compiled as Dynamo meets it; their order is noted
              the backward pass begins: the graphs are known, and the budget is divided
    step 2    they are compiled for their shares

A graph that is alone has the whole budget from the first step on. Once there are more, those that
are met later save as little as can be until the budget is divided. A budget that cannot be met is
an error when the first backward pass begins, before there is a gradient.

Where a size is a symbol, plans for a budget in bytes are for the largest that was met. A call with
a larger one compiles its graph once more. What a part of plain's peak allows grows with the sizes.
"""

import copy
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.autodiff.tiles.tile_joint import Tiling, tile_joint
from torchremat.compile.dynamo.divided_budget import (
    DividedBudget,
    GraphCosts,
    GraphShare,
    divide_budget,
)
from torchremat.compile.dynamo.passed_memory import CallTensors, PassedMemory
from torchremat.core.formatting import human_bytes
from torchremat.core.source import warn_user
from torchremat.errors import BudgetError, BudgetWarning
from torchremat.planning.budget import Budget
from torchremat.planning.budget_policy import MemoryBudget
from torchremat.policies.builtin import everything_saveable, nothing_saveable
from torchremat.policies.policy import Policy
from torchremat.tracing.ambient_state import AmbientState

# How finely graphs are cut, one after the other, if the budget cannot be divided without tiles.
_TILINGS = (Tiling(16), Tiling(64, again=True))

_logger = logging.getLogger("torchremat")

# Calls that are noted before those are looked for whose backward pass can come no more.
_FIRST_LOOK = 64

Compile = Callable[[fx.GraphModule, Sequence[Any], Policy], Callable[..., Any]]
TraceJoint = Callable[[fx.GraphModule, Sequence[Any]], Joint | None]


# How often a graph is compiled anew for just as large sizes as it meets. Chosen by hand.
_AS_MET = 3
# From then on there is room: sizes that grow in each step would each compile it. Chosen by hand.
_ROOM = 1.25


class Fragment:
    """A graph that Dynamo captured, compiled; once more when its share of the budget is known.

    Attributes:
        sizes: the values of its symbols that it is planned for.
        is_hopeless: whether its share could not be met, so that it runs with the least peak.
    """

    def __init__(
        self,
        job: "FragmentJob",
        module: fx.GraphModule,
        inputs: Sequence[Any],
        compile_with: Compile,
        policy: Policy,
    ) -> None:
        self.job = job
        self.compile_with = compile_with
        # the inputs themselves are tensors of the user's, which nobody should keep
        self.inputs, self._enter_context = _torch.keep_compile_context(inputs)
        self._state = AmbientState.now()
        names = ((i, _torch.size_name(value)) for i, value in enumerate(inputs))
        self._symbols = [(i, n) for i, n in names if n is not None and job.is_in_bytes]
        self.sizes = {name: _torch.hint_of(inputs[i]) for i, name in self._symbols}
        self._largest = self._now = self.sizes
        self._num_grown = 0
        self._module = fx.GraphModule(module, copy.deepcopy(module.graph))
        self.policy = policy
        self._run = compile_with(module, inputs, policy)
        self._wanted: Policy | None = None
        self._is_outgrown = False
        self.is_hopeless = False

    def __call__(self, *args: Any) -> Any:
        self._now = {name: args[i] for i, name in self._symbols}
        if any(size > self.sizes[name] for name, size in self._now.items()):
            self._grow(self._now)
        if self._wanted is not None:
            self._compile_again(self._wanted)
        results = self._run(*args)
        self.job.note_call(self, args, results)
        return results

    def _grow(self, sizes: Mapping[str, int]) -> None:
        """Plan for sizes that are larger than those before."""
        self._num_grown += 1
        room = _ROOM if self._num_grown > _AS_MET else 1
        before = self.sizes
        self._largest = {name: max(sizes[name], self._largest[name]) for name in sizes}
        self.sizes = {n: int(room * s) if s > before[n] else before[n] for n, s in sizes.items()}
        self._is_outgrown = True
        self.job.note_growth(self, math.prod(sizes[n] / before[n] for n in sizes if before[n]))

    @property
    def room(self) -> float:
        """How much larger the sizes are that it is planned for than those of its last call."""
        return math.prod(self.sizes[n] / size for n, size in self._now.items() if size)

    def copy_module(self) -> fx.GraphModule:
        return fx.GraphModule(self._module, copy.deepcopy(self._module.graph))

    def trace(self, trace_joint: TraceJoint) -> Joint | None:
        with self._again():
            return _torch.run_outside_dynamo(lambda: trace_joint(self.copy_module(), self.inputs))

    @contextmanager
    def _again(self) -> Iterator[None]:
        """As when Dynamo captured the graph; a backward pass may be under way."""
        with self._enter_context(), self._state.restore(), torch.enable_grad():
            yield

    def ask_for(self, policy: Policy) -> None:
        """Let the next call compile for `policy`, unless the graph is compiled for it."""
        self._wanted = None if policy == self.policy and not self._is_outgrown else policy

    def _compile_again(self, policy: Policy) -> None:
        self._wanted, self._is_outgrown, self.is_hopeless = None, False, False
        with self._again():
            try:
                self._run = self._compile(policy)
            except BudgetError as error:
                policy, self.is_hopeless = self.job.refuse(error), True
                self._run = self._compile(policy)
        self.policy = policy

    def _compile(self, policy: Policy) -> Callable[..., Any]:
        """Compile for the sizes, with room to grow if the budget lets them have it."""

        def compile_now() -> Callable[..., Any]:
            with _torch.assume_sizes(self.sizes or None):
                return self.compile_with(self.copy_module(), self.inputs, policy)

        try:
            return _torch.run_outside_dynamo(compile_now)
        except BudgetError:
            if self.sizes == self._largest:
                raise
        self.sizes = self._largest
        return _torch.run_outside_dynamo(compile_now)


@dataclass(frozen=True, eq=False)
class _GraphCall:
    """A call of a graph, which lives as a hook of its backward pass."""

    job: "FragmentJob"
    fragment: Fragment
    tensors: CallTensors

    def __call__(self, _: Any) -> None:
        self.job.note_backward()


class FragmentJob:
    """The graphs of one `torch.compile` and their budget.

    Attributes:
        has_new: whether a graph was added since the budget was divided, or has larger sizes.
        is_in_bytes: whether the budget is.
    """

    def __init__(self, policy: MemoryBudget, trace_joint: TraceJoint, *, fuses: bool) -> None:
        self.policy, self.fuses = policy, fuses
        self.has_new = False
        self._trace_joint = trace_joint
        self._fragments: list[Fragment] = []
        self._calls: list[weakref.ref[_GraphCall]] = []
        self._next_look = _FIRST_LOOK
        self._budget = Budget.of(policy.budget)  # type: ignore[arg-type]
        self.is_in_bytes = not self._budget.is_relative
        self._largest = 0
        self._was_alone = False
        self._limit = self._expected_peak = 0
        """The bytes of the budget, and those of a step, once it is divided."""
        self._has_warned = False
        self._if_alone: BudgetError | None = None
        """Why the budget cannot be met, if the first graph turns out to be the whole step."""

    def add(self, module: fx.GraphModule, inputs: Sequence[Any], compile_with: Compile) -> Fragment:
        """Compile one more graph."""
        has_others = bool(self._fragments) and not self._was_alone
        is_one_of_many = has_others or _torch.ends_in_graph_break(module)
        policy = self._provisional if is_one_of_many else self.policy
        try:
            fragment = Fragment(self, module, inputs, compile_with, policy)
        except BudgetError as error:
            if self.policy.on_infeasible == "error" or not self._budget.is_relative:
                raise
            self._if_alone = error  # of a larger step, the budget may be met
            fragment = Fragment(self, module, inputs, compile_with, self._provisional)
        self._fragments.append(fragment)
        self.has_new = True
        return fragment

    def note_growth(self, fragment: Fragment, growth: float) -> None:
        """A graph is about to run with sizes that are so many times those it is planned for."""
        if fragment.is_hopeless:
            return
        if self._was_alone or not self._limit:
            if fragment.policy == self.policy:
                fragment.ask_for(self.policy)
            return
        self.has_new = True
        if growth * self._expected_peak > self._limit:  # until it is divided anew
            fragment.ask_for(self._least)

    def note_call(self, fragment: Fragment, args: Sequence[Any], results: Sequence[Any]) -> None:
        """A graph has run: its call counts for as long as autograd has what it saved."""
        tensors = (r for r in results if isinstance(r, Tensor) and r.grad_fn is not None)
        first = next(tensors, None)
        if first is None or first.grad_fn is None:
            return
        call = _GraphCall(self, fragment, CallTensors.of(args, results))
        if self.has_new:
            before = filter(None, (reference() for reference in self._calls))
            call.tensors.note_alive(earlier.tensors for earlier in before)
        first.grad_fn.register_prehook(call)
        if len(self._calls) >= self._next_look:
            self._calls = [c for c in self._calls if c() is not None]
            self._next_look = 2 * len(self._calls) + _FIRST_LOOK
        self._calls.append(weakref.ref(call))

    def note_backward(self) -> None:
        """The backward pass of a step begins, or that of another of its graphs."""
        calls = [call for c in self._calls if (call := c()) is not None]
        self._calls.clear()
        if not self.has_new or not calls:
            return
        self.has_new = False
        error, self._if_alone = self._if_alone, None
        self._was_alone = len(calls) == 1
        if not self._was_alone:
            self._divide(calls)
        elif error is not None:
            raise error
        else:
            calls[0].fragment.ask_for(self.policy)

    def _divide(self, calls: Sequence[_GraphCall]) -> None:
        fragments = dict.fromkeys(call.fragment for call in calls)
        traced = {f: f.trace(self._trace_joint) for f in fragments}
        joints = {f: joint for f, joint in traced.items() if joint is not None}
        calls = [call for call in calls if call.fragment in joints]
        if not calls:
            return
        found = self._divide_over(calls, joints, self._budget)
        for tiling in _TILINGS if self.policy.tile and self._budget.added is None else ():
            if found.least_peak is None and not self._budget.is_least:
                break
            found = self._divide_in_tiles(calls, joints, tiling, found)
        if not self._largest and found.least_peak is not None:
            raise self._build_budget_error(found, found.least_peak, len(joints))
        self._largest = max(self._largest, found.plain_peak)
        self._limit, self._expected_peak = found.limit, min(found.limit, found.plain_peak)
        for fragment in joints:
            fragment.ask_for(self._policy_of(found.shares[fragment], found))
        _logger.info(
            "%s: %s over %d graphs, which take %s without rematerialisation",
            self.policy,
            human_bytes(found.limit),
            len(joints),
            human_bytes(found.plain_peak),
        )

    def _divide_over(
        self, calls: Sequence[_GraphCall], joints: Mapping[Fragment, Joint], budget: Budget
    ) -> DividedBudget:
        costs = {f: self._costs_of(f, joint) for f, joint in joints.items()}
        order = [call.fragment for call in calls]
        tensors = [call.tensors for call in calls]
        saves = [costs[f].find_saves(costs[f].points[-1]) for f in order]  # they save little yet
        return divide_budget(
            budget,
            order,
            costs,
            PassedMemory(tensors, saves, max(fragment.room for fragment in order)),
            resident=self.policy.resident_bytes,
            largest=self._largest,
        )

    def _divide_in_tiles(
        self,
        calls: Sequence[_GraphCall],
        joints: Mapping[Fragment, Joint],
        tiling: Tiling,
        before: DividedBudget,
    ) -> DividedBudget:
        """The division with tiles in the graphs, or `before` if that needs less."""
        tiled = {f: tile_joint(joint, tiling) or joint for f, joint in joints.items()}
        budget = self._budget if self._budget.is_least else Budget(nbytes=before.limit)
        found = self._divide_over(calls, tiled, budget)
        found = replace(found, plain_peak=before.plain_peak)
        return min(before, found, key=lambda d: (d.least_peak is not None, d.least_peak or d.limit))

    @property
    def _least(self) -> Policy:
        return replace(self.policy, budget="least", saved=None, resident=0)

    @property
    def _provisional(self) -> Policy:
        """The policy of a graph whose share is not known yet: it saves little."""
        return self._least if self.policy.tile else nothing_saveable

    def _build_budget_error(self, found: DividedBudget, least: int, count: int) -> BudgetError:
        return BudgetError(
            f"{self.policy!r}: a peak of {human_bytes(found.limit)} cannot be met over the {count} "
            f"graphs between graph breaks. The least that was found is {human_bytes(least)} "
            f"({least} bytes), of {human_bytes(found.plain_peak)} without rematerialisation. Give "
            f"a budget of at least {least}, a smaller batch, or a model with fewer graph breaks",
            least,
        )

    def _costs_of(self, fragment: Fragment, joint: Joint) -> GraphCosts:
        with _torch.assume_sizes(fragment.sizes or None):
            planner = replace(self.policy, resident=0).planner(joint, fuses=self.fuses)
            _ = planner.step  # its bytes are those of these sizes
            return GraphCosts(planner)

    def _policy_of(self, share: GraphShare, found: DividedBudget) -> Policy:
        if found.plain_peak <= found.limit:
            return everything_saveable
        return replace(
            self.policy,
            budget=found.limit,
            saved=share.saved_bytes,
            resident=share.resident_bytes,
        )

    def refuse(self, error: BudgetError) -> Policy:
        """Raise, or warn once, of a share that cannot be met; give the policy in its place."""
        if self.policy.on_infeasible == "error":
            raise error
        if not self._has_warned:
            self._has_warned = True
            least = error.least_bytes
            warn_user(
                f"{self.policy!r} cannot be met over the {len(self._fragments)} graphs between "
                f"graph breaks. One of them takes {human_bytes(least)} ({least} bytes) with what "
                "the others hold. It runs with the least peak that was found, and so do others "
                "like it. Give a larger budget or a smaller batch; on_infeasible='error' raises",
                BudgetWarning,
            )
        return self._least


_jobs: list[tuple[Mapping[str, Any], weakref.ref[FragmentJob]]] = []
"""By the options of `torch.compile`, by identity: those of one call are of all its graphs."""


def job_of(options: Mapping[str, Any], make: Callable[[], FragmentJob]) -> FragmentJob:
    """The job of these `options`. Its graphs keep it alive."""
    alive = [(known, reference) for known, reference in _jobs if reference() is not None]
    found = next((job for known, job in alive if known is options), None)
    job = None if found is None else found()
    if job is None:
        job = make()
        alive.append((options, weakref.ref(job)))
    _jobs[:] = alive
    return job
