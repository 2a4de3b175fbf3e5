"""Plans that the processes of a job agree on: made by one of them, taken by all.

    process 0   is first to plan a graph: looks for a schedule, and tells it
    process 1   plans the same graph: takes what process 0 found, within what it knows of the graph
    process 2   plans another graph (another stage of a pipeline, a last batch): looks by itself

The key of a plan is made of the graph, the budget and the cost model. So processes may plan in any
order, not all of them need to, and none waits for a process that plans nothing.
"""

import hashlib
from collections.abc import Callable

from torchremat import _torch
from torchremat.core.formatting import human_bytes
from torchremat.errors import ArgumentTypeError, PlanError, ProcessError
from torchremat.parallel.devices import process_index
from torchremat.parallel.process_failures import (
    can_share,
    describe_peers,
    gather_texts,
    name_processes,
    publish_host,
    wait_for,
)
from torchremat.planning.plan import Plan
from torchremat.planning.search.shared_solve import let_processes_share
from torchremat.planning.step.fingerprint import find_difference

_PREFIX = "torchremat/plan"
_FAILED = "failed: "


def make_once(describe: Callable[[], str], make: Callable[[], str]) -> str:
    """Return the text of `make`, called in the first of the processes of equal `describe`.

    Raises `ProcessError` in the others if that one fails, is gone, or takes longer than the timeout
    that the process group was made with.
    """
    if not can_share():
        return make()
    store, here = _torch.store_of_processes(), process_index()
    publish_host(store)
    key = f"{_PREFIX}/{hashlib.sha256(describe().encode()).hexdigest()}"
    if store.add(f"{key}/askers", 1) == 1:
        store.set(f"{key}/maker", str(here))
        try:
            text = make()
        except BaseException as error:
            store.set(f"{key}/made", f"{_FAILED}{type(error).__name__}: {error}")
            raise
        store.set(f"{key}/made", text)
        return text
    return _wait_for_text(store, key)


def _wait_for_text(store: object, key: str) -> str:
    maker = "another process"
    try:
        rank = int(store.get(f"{key}/maker"))  # type: ignore[attr-defined]
        maker = name_processes([rank])
        wait_for(store, {f"{key}/made": rank})
    except RuntimeError as error:  # ProcessError is one
        raise ProcessError(
            f"process {process_index()} waits for a plan that {maker} is making, and did not get "
            f"it{error if isinstance(error, ProcessError) else ''}. {describe_peers()}"
        ) from error
    text: str = store.get(f"{key}/made").decode()  # type: ignore[attr-defined]
    if text.startswith(_FAILED):
        raise ProcessError(
            f"process {process_index()} waits for a plan that {maker} was making, which stopped "
            f"with {text.removeprefix(_FAILED)}"
        )
    return text


let_processes_share(make_once)


def agreed_plan(plan: Plan) -> Plan:
    """The plan of process 0, in all processes, once each has said that its own is of the same step.

    Every process calls it, with the plan that it made (`tr.plan`: the search is made once, in the
    first process that asks for it). What is returned has the schedule and the figures of process 0.

    Args:
        plan: what this process planned.

    Raises:
        ProcessError: (a `RuntimeError`) in each process, if some planned another graph or for
            another budget: which processes, and where the first difference is. Also if one of them
            is gone, or does not call it for as long as the timeout of the process group.
        TypeError: if `plan` is none.

    >>> import torch, torchremat as tr
    >>> f = lambda x: x.sin().sin().sin().sin().sum()
    >>> plan = tr.plan(f, torch.ones(256, requires_grad=True), budget=0.9)
    >>> g = tr.checkpoint(f, policy=tr.checkpoint_policies.from_plan(tr.parallel.agreed_plan(plan)))
    """
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"agreed_plan takes a Plan, as tr.plan makes it, but it is {plan!r}"
        )
    if not can_share():
        return plan
    here, does = process_index(), "calls agreed_plan"
    (first, *_) = gather_texts(plan.to_json() if here == 0 else "", does)
    try:
        theirs = Plan.from_json(first)
    except PlanError as error:  # of another version of this package, say
        gather_texts(f"cannot read the plan of process 0: {error}", does)
        raise
    answers = gather_texts(_why_other(theirs, plan), does)
    if others := {rank: answer for rank, answer in enumerate(answers) if answer}:
        lines = "".join(f"\n  process {rank}: {answer}" for rank, answer in others.items())
        raise ProcessError(
            f"{name_processes(list(others))} planned another step than process 0, so there "
            "is no one plan for all. Give each process the same model, budget and shapes, or plan "
            f"by itself what differs.{lines}"
        )
    return plan if here == 0 else theirs


def _why_other(first: Plan, own: Plan) -> str:
    """How the step that was planned in process 0 and that of another differ; empty if not."""
    if first.fingerprint != own.fingerprint:
        return find_difference(first.graph, own.graph)
    if first.budget != own.budget:
        budgets = human_bytes(own.budget), human_bytes(first.budget)
        return f"the budget is {budgets[0]}, and {budgets[1]} in process 0"
    return ""
