"""One budget for a model whose layers are wrapped one by one.

A layer that is sharded, or compiled, by itself is a checkpoint of its own, with a policy of its
own. One rule sets the limits of all: the values that cost the least time per byte are recomputed
first.

    layer       bytes saved, and the time to recompute the rest
    layers.0    2.3 MiB, 0    1.3 MiB, 36 us    0.3 MiB, 135 us    0, 172 us
    layers.1    the same, if it is alike

    steps       36 us a MiB, in each layer;  then 99 us;  then 148 us: as many as the budget needs
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from torchremat.autodiff.joint import Joint
from torchremat.core.formatting import human_bytes, human_seconds, table
from torchremat.errors import ArgumentTypeError, BudgetError, BudgetSpellingError, TraceError
from torchremat.graph.schedule import GraphSchedule
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.nn.wrap import unwrap, wrap
from torchremat.planning.budget import Budget, BudgetLike
from torchremat.planning.budget_policy import memory_budget
from torchremat.planning.cost_model import CostModel
from torchremat.planning.estimate import Estimate, estimate
from torchremat.planning.planner import Planner
from torchremat.planning.saved_curve import SavedPoint, trace_saved_curve
from torchremat.planning.step.fingerprint import lines_of
from torchremat.planning.step.problem_builder import cotangent_nbytes
from torchremat.planning.step.traced_step import WholeGraphPolicy, differentiates, forward_only
from torchremat.policies.builtin import everything_saveable, nothing_saveable
from torchremat.policies.module_selection import Select, select_modules
from torchremat.policies.policy import Policy
from torchremat.remat.module_policies import copy_with_same_state
from torchremat.remat.tracing.input_labels import refuse_misspelt
from torchremat.tracing.modules.parallel_kind import parallel_kind

# Traces of the whole model, which take most of the time. The search aims at the budget by the bytes
# saved, and so needs few; the limit, chosen by hand, ends one that does not converge.
_MOST_TRACES = 8

_Lines = tuple[str, ...]
"""A graph, a line for each node: layers that are alike have one curve."""


@dataclass(frozen=True)
class LayerShare:
    """A layer with its limit and policy: a row of `BudgetSplit`.

    Attributes:
        name: qualified name of the layer.
        saved_bytes: the most bytes that it saves for the backward pass, without its inputs, which
            are alive anyway.
        plain_saved_bytes: the bytes that it saves without rematerialisation.
        policy: the policy for `nn.wrap` that keeps to this limit.
    """

    name: str
    saved_bytes: int
    plain_saved_bytes: int
    policy: Policy


@dataclass(frozen=True)
class BudgetSplit(Mapping[Select, Policy]):
    """A policy for each layer, by its name, as `nn.wrap` takes them: the result of `split_budget`.

    Attributes:
        budget: the budget of the step in bytes.
        peak_bytes: the most bytes alive at one time with these policies.
        plain_peak_bytes: without rematerialisation.
        recompute_seconds: the time that recomputation adds, by the cost model.
        layers: a `LayerShare` each.
    """

    budget: int
    peak_bytes: int
    plain_peak_bytes: int
    recompute_seconds: float
    layers: tuple[LayerShare, ...]

    def __getitem__(self, name: Select) -> Policy:
        return self._policies[name]

    def __iter__(self) -> Iterator[Select]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def _policies(self) -> dict[Select, Policy]:
        return {layer.name: layer.policy for layer in self.layers}

    def __str__(self) -> str:
        head = (
            f"peak {human_bytes(self.peak_bytes)} of {human_bytes(self.plain_peak_bytes)}, budget "
            f"{human_bytes(self.budget)}; adds {human_seconds(self.recompute_seconds)}"
        )
        rows = [("layer", "keeps", "without", "policy")]
        for layer in self.layers:
            rows.append((
                layer.name, human_bytes(layer.saved_bytes), human_bytes(layer.plain_saved_bytes),
                str(layer.policy),
            ))  # fmt: skip
        return "\n".join([head, *table(rows, numeric=(1, 2))])


def split_budget(
    module: nn.Module,
    *args: Any,
    budget: BudgetLike,
    select: Select,
    cost_model: CostModel | None = None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> BudgetSplit:
    """Find a policy for each layer so that a step of the whole model keeps within one `budget`.

    It is for layers that are checkpoints one by one, since each is sharded (`fully_shard`) or
    compiled by itself. Where the model can be wrapped as a whole, `wrap(model, "budget:8GiB")` and
    `plan` choose more freely. Nothing is run, and `module` stays as it is: it may be on the meta
    device. Give it before it is sharded.

    The peak is that of the unsharded step: values, outputs and all gradients. Parameters and inputs
    do not count. A simulation finds it; the cotangent of the largest layer is added, since autograd
    may keep one more alive than the simulation has.

    Args:
        module: the model.
        *args: its arguments; only their shapes, dtypes and devices matter.
        budget: bytes (an `int`, or text such as `"8GiB"`), or a fraction in (0, 1] of the peak
            without rematerialisation (a `float`, or `"50%"`). `"least"` saves nothing but inputs.
        select: the layers, as `wrap` takes it.
        cost_model: what operators cost in seconds; by default a roofline of `device`.
        device: where the step is to run; by default where the tensors are.
        **kwargs: keyword arguments of `module`.

    Returns:
        A `BudgetSplit`: a mapping from names to policies for `wrap`; `print` shows it as a table.

    Raises:
        BudgetError: (a `RuntimeError`) with the least budget that can be met, if this cannot.
        NoMatchError: (a `ValueError`) if `select` matches nothing.
        TypeError: if `module` is none, or has been sharded or made parallel.
        TypeError, ValueError: for a budget that is none, and where `checkpoint` raises them.

    >>> def layer():
    ...     return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())
    >>> model = nn.Sequential(layer(), layer(), layer())
    >>> x = torch.ones(64, 8)
    >>> split = split_budget(model, x, budget="90%", select="*")
    >>> split.peak_bytes <= split.budget < split.plain_peak_bytes
    True
    >>> model = wrap(model, split)
    """
    refuse_misspelt(split_budget, module, kwargs)
    limit = Budget.of(budget)
    if limit.added is not None:
        raise BudgetSpellingError(
            f"split_budget(budget={budget!r}): a time is not a budget that is divided. Give bytes, "
            "a fraction or 'least'; the split says what time it adds (recompute_seconds)"
        )
    layers = _Layers(module, select, args, kwargs, {"cost_model": cost_model, "device": device})
    most = layers.peak(_Steps(0))
    if limit.is_least:
        nbytes = min(most, layers.peak(_Steps(len(layers.steps))))
    else:
        nbytes = limit.bytes_of(most)
    done = layers.least_steps(nbytes)
    if done is None:
        least = layers.peak(_Steps(len(layers.steps)))
        raise BudgetError(
            f"split_budget(budget={budget!r}, select={select!r}): a peak of {human_bytes(nbytes)} "
            f"cannot be met. If the {len(layers.curves)} layers save nothing but their inputs, it "
            f"is {human_bytes(least)} ({least} bytes), of {human_bytes(most)} without "
            "rematerialisation. Give a budget of at least that, a smaller batch, or select more",
            least,
        )
    better = layers.with_spare_bytes(done, nbytes)
    return BudgetSplit(
        nbytes,
        layers.peak(better),
        most,
        max(0.0, layers.estimates[better].seconds - layers.estimates[_Steps(0)].seconds),
        tuple(layers.shares(better)),
    )


@dataclass(frozen=True)
class _Steps:
    """How many steps are done, and the bytes that the last of them may save all the same."""

    count: int
    spare: int = 0


class _Layers:
    """The layers of a model, and the steps from saving all of their values to saving none.

    Attributes:
        curves: by the name of each layer that has a backward pass.
        steps: the name of the layer that steps down its curve, for each step in order.
        estimates: peak and time of the model's training step, by the steps that are done.
    """

    def __init__(
        self,
        module: nn.Module,
        select: Select,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        _check_whole(module)
        self._module = unwrap(copy_with_same_state(module))
        self._args, self._kwargs = args, {**options, **kwargs}
        self.estimates: dict[_Steps, Estimate] = {}
        seen = {name: _JointRecorder() for name, _ in select_modules(module, select)}
        self.estimates[_Steps(0)] = self._estimate(seen)
        joints = {name: s.joints for name, s in seen.items() if s.joints}
        if not joints:
            raise TraceError(
                f"split_budget(select={select!r}): none of the {len(seen)} layers "
                f"({next(iter(seen))!r}, ...) has a backward pass when the model is called with "
                "these arguments. Select layers that its forward calls, with parameters to train"
            )
        model = options["cost_model"] or CostModel.of(options["device"])
        cache: dict[_Lines, _Curve] = {}
        self.curves = {name: _Curve.of(found, model, cache) for name, found in joints.items()}
        self._cotangent_bytes = max(curve.cotangent_nbytes for curve in self.curves.values())
        self.steps = [name for _, name in sorted(self._slopes(), key=lambda pair: pair[0])]

    def _slopes(self) -> Iterator[tuple[float, str]]:
        for name, curve in self.curves.items():
            for a, b in pairwise(curve.points):
                yield (b.added_seconds - a.added_seconds) / (a.saved_bytes - b.saved_bytes), name

    def limits(self, done: _Steps) -> dict[str, int]:
        steps = Counter(self.steps[: done.count])
        saved = {name: c.points[steps[name]].saved_bytes for name, c in self.curves.items()}
        if done.spare:
            name = self.steps[done.count - 1]
            before = self.curves[name].points[steps[name] - 1].saved_bytes
            saved[name] = min(saved[name] + done.spare, before)
        return saved

    def shares(self, done: _Steps) -> Iterator[LayerShare]:
        for name, nbytes in self.limits(done).items():
            plain = self.curves[name].points[0].saved_bytes
            yield LayerShare(name, nbytes, plain, _policy_of(nbytes, plain))

    def peak(self, done: _Steps) -> int:
        if done not in self.estimates:
            policies = {share.name: share.policy for share in self.shares(done)}
            self.estimates[done] = self._estimate(policies)
        return self.estimates[done].peak_bytes + self._cotangent_bytes

    def _estimate(self, policies: Mapping[str, Policy]) -> Estimate:
        try:
            wrap(self._module, {name: policy for name, policy in policies.items()})
            return estimate(self._module, *self._args, **self._kwargs)
        finally:
            unwrap(self._module)

    def least_steps(self, nbytes: int) -> _Steps | None:
        """The fewest steps that were found to bring the peak down to `nbytes`; `None` if none do.

        The peak at a count is predicted from that at a smaller one, by the bytes that are no longer
        saved.
        """
        last = len(self.steps)
        saved = [sum(self.limits(_Steps(k)).values()) for k in range(last + 1)]
        above, within = 0, last + 1
        if self.peak(_Steps(0)) <= nbytes:
            return _Steps(0)
        for _ in range(_MOST_TRACES):
            goal = saved[above] - (self.peak(_Steps(above)) - nbytes)
            between = range(above + 1, within)
            if not between:
                break
            tried = next((k for k in between if saved[k] <= goal), between[-1])
            spare = nbytes - self.peak(_Steps(tried))
            if spare < 0:
                above = tried
                continue
            within = tried
            if spare < saved[tried - 1] - saved[tried]:  # one step less would be too few
                break
        if within > last and self.peak(_Steps(last)) > nbytes:
            return None
        return _Steps(min(within, last))

    def with_spare_bytes(self, done: _Steps, nbytes: int) -> _Steps:
        """Let the last step save the bytes that the budget leaves, if its peak is within it."""
        spare = nbytes - self.peak(done)
        if not done.count or not spare:
            return done
        better = _Steps(done.count, spare)
        return better if self.peak(better) <= nbytes else done


def _check_whole(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"split_budget takes an nn.Module, but it was given {module!r}")
    for path, inner in module.named_modules():
        if kind := parallel_kind(inner):
            raise ArgumentTypeError(
                "split_budget takes a model before it is made parallel, but "
                f"{repr(path) + ' in it' if path else 'it'} {kind}. Build the model again, on the "
                "meta device say (with torch.device('meta'): model = Model()), and split the "
                "budget of that: names are the same"
            )


class _JointRecorder(WholeGraphPolicy):
    """A policy that saves what plain autograd saves, and records the joint graphs it meets."""

    def __init__(self) -> None:
        self.joints: list[Joint] = []

    def __deepcopy__(self, memo: object) -> "_JointRecorder":
        return self  # a model off the meta device is a copy

    def schedule(
        self, joint: Joint, *, fuses: bool = False, sizes: Sizes | None = None
    ) -> GraphSchedule:
        del fuses, sizes
        if not differentiates(joint):
            return forward_only(joint)
        self.joints.append(joint)
        return Planner(joint).plain.graph_schedule


@dataclass(frozen=True)
class _Curve:
    """The points of a layer, most bytes saved first, and the bytes of its outputs' cotangents."""

    points: tuple[SavedPoint, ...]
    cotangent_nbytes: int

    @classmethod
    def of(
        cls, joints: Sequence[Joint], model: CostModel, cache: "dict[_Lines, _Curve]"
    ) -> "_Curve":
        """Trace the curve of a layer; if it is called in several ways, that with the most bytes."""
        found = []
        for joint in joints:
            lines = lines_of(joint.module.graph)
            if lines not in cache:
                planner = Planner(joint, cost_model=model)
                nbytes = cotangent_nbytes(planner.joint)
                cache[lines] = cls(tuple(trace_saved_curve(planner)), nbytes)
            found.append(cache[lines])
        return max(found, key=lambda curve: curve.points[0].saved_bytes)


def _policy_of(saved_bytes: int, plain: int) -> Policy:
    if saved_bytes == plain:
        return everything_saveable
    return memory_budget(saved=saved_bytes) if saved_bytes else nothing_saveable
