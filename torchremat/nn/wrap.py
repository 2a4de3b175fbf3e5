"""Modules that run under `checkpoint`, and are otherwise unchanged."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from torchremat.compile.lowering import check_backend
from torchremat.core.source import warn_user
from torchremat.core.unknown_options import OPTIONS_OF_TORCH, refuse_unknown
from torchremat.errors import (
    ArgumentTypeError,
    BudgetWarning,
    NoMatchError,
    NoStepError,
    TorchrematError,
)
from torchremat.planning.budget_job import BudgetJob, declare_largest_step
from torchremat.planning.budget_policy import BudgetInJob
from torchremat.planning.step.traced_step import region_of
from torchremat.policies.builtin import nothing_saveable
from torchremat.policies.module_selection import Select
from torchremat.policies.policy import Policy, PolicyLike
from torchremat.remat.checkpoint import check_prevent_cse
from torchremat.remat.module_forward import RematForward, remat_forward_of
from torchremat.remat.module_policies import PolicyByPattern, assign_policies
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.tape.limited_calls import TapeJob
from torchremat.remat.tape.tape import TapeSummary
from torchremat.remat.tape.taped_call import find_policy
from torchremat.remat.tracing.input_labels import labels_of_storages
from torchremat.report.explain import report_of_programs
from torchremat.report.report import Report

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@refuse_unknown(OPTIONS_OF_TORCH, "options are given by keyword, wrap(model, 'dots', select=...)")
def wrap(
    module: AnyModule,
    policy: PolicyLike | PolicyByPattern | None = None,
    *,
    select: Select | None = None,
    prevent_cse: Any = True,
    compile: str | None = None,
    example: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
) -> AnyModule:
    """Make `module`, or the submodules that `select` means, run under `checkpoint`. In place.

    Classes, qualified names, `state_dict`, parameters, hooks, `train` and `eval`, `isinstance`,
    pickling and `copy.deepcopy` are as before; a copy is wrapped and independent. (`copy.copy` and
    `nn.DataParallel` share a module's attributes between modules, so what they make would run with
    the parameters of the original: unwrap first.) Wrapping twice replaces the first. Nothing is
    wrapped if there is an error. Under `no_grad` and `inference_mode` a module runs as it is,
    unless `compile` is given.

    Args:
        module: what to wrap. A module that the model has in several places is wrapped once.
        policy: what may be saved, `None` for nothing but inputs; module names in it, as in
            `save_modules("layers.*.attn")`, are counted from `module`. A dict from selections to
            policies wraps each submodule under the policy of the first that matches it.
        select: `"layers.*"`, `"every:3"`, `"first:2,!layers.0"`, a class or a predicate:
            `select_modules` has the rules. `None` is `module` itself.
        prevent_cse: as `checkpoint` takes it.
        compile: a backend that compiles the forward and backward graphs of each checkpoint:
            `"inductor"`, or `"aot_eager"` to look for errors. Random masks are then saved, not
            replayed, and each new size is compiled anew. (`torch.compile(model)` around a
            wrapped model compiles what lies between the checkpoints, too.)
        example: the arguments of the largest step, `(args, kwargs)`, of which shapes, dtypes and
            devices matter: the longest batch of a training. It is traced now, not run. Budgets
            that depend on a step (`"60%"`) become bytes by it, and are planned for it. A model
            that is not a graph ignores it, with a `BudgetWarning`.

    Returns:
        `module`.

    Raises:
        NoMatchError: (a `ValueError`) if a selection matches nothing, with the nearest names.
        ValueError: if a selection cannot be read, is out of range, or has no effect; or if there is
            no such backend.
        TypeError: for a `module`, `select`, `policy`, `prevent_cse` or `example` that is none.
        BudgetError: (a `RuntimeError`) if a step like `example` cannot keep within a budget.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    >>> model = wrap(model, "dots", select="first:2")
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> sorted(model.state_dict()), type(model[0]).__name__
    (['0.bias', '0.weight', '2.bias', '2.weight'], 'Linear')
    """
    if isinstance(module, list | tuple):
        raise ArgumentTypeError(
            f"wrap takes one nn.Module, but it was given a {type(module).__name__}. Wrap each: "
            "for block in blocks: wrap(block, policy)"
        )
    if not isinstance(module, nn.Module):
        kind = f"the class {module.__name__}" if isinstance(module, type) else repr(module)
        raise ArgumentTypeError(
            f"wrap takes an nn.Module, but it was given {kind}; a function is given to checkpoint"
        )
    if compile is not None:
        check_backend(compile, "compile")
    check_prevent_cse(prevent_cse)
    if example is not None:
        _check_example(example)
    forwards = [
        RematForward(submodule, name, chosen, prevent_cse, compile)
        for name, submodule, chosen in assign_policies(module, policy, select)
    ]
    for forward in forwards:
        forward.install()
    if example is not None:
        try:
            _declare(module, *example)
        except BaseException:
            for forward in forwards:
                forward.uninstall()
            raise
    return module


def _check_example(example: Any) -> None:
    pair = example if isinstance(example, tuple) and len(example) == 2 else (None, None)
    if not isinstance(pair[0], tuple | list) or not isinstance(pair[1], Mapping):
        raise ArgumentTypeError(
            f"wrap(example=...) takes the arguments of a call as (args, kwargs), but it is "
            f"{type(example).__name__}: example=((tokens,), {{}}) is for model(tokens)"
        )


def _declare(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let policies decide on the largest step, of `module` or of what is wrapped inside it."""
    forward = remat_forward_of(module)
    try:
        with declare_largest_step(), torch.enable_grad():
            if forward is not None:
                forward.trace_call(tuple(args), dict(kwargs))
            else:
                region_of(module, tuple(args), dict(kwargs))
    except TorchrematError as error:
        if find_policy(module, nothing_saveable, error) is None:
            raise
        why = str(error).strip().partition("\n")[0]
        warn_user(
            f"wrap(example=...) is ignored: {type(module).__name__} cannot be one graph ({why}). "
            "Calls of such run on tapes, which need values. A percentage is of the largest step "
            "so far: begin with the largest, or give bytes",
            BudgetWarning,
        )


def unwrap(module: AnyModule) -> AnyModule:
    """Undo `wrap` in `module` and all of its submodules, in place, and return `module`.

    What was never wrapped stays as it is.

    >>> linear = nn.Linear(2, 2)
    >>> before = dict(vars(linear))
    >>> vars(unwrap(wrap(linear))) == before
    True
    """
    for submodule in module.modules():
        forward = remat_forward_of(submodule)
        if forward is not None:
            forward.uninstall()
    return module


def _describe_no_report(module: nn.Module) -> str:
    if "_orig_mod" in dict(module.named_children()):
        return (
            "a compiled model reports by an option of its backend: torch.compile(model, "
            "backend='torchremat', options={'policy': ..., 'report': print})"
        )
    return (
        f"nothing in {type(module).__name__} is wrapped; torchremat.nn.wrap(model, policy, "
        "select=...) does it"
    )


def report(module: nn.Module) -> Report:
    """Report what the last step saved, recomputed and offloaded, per wrapped module in `module`.

    Of each module the last call that recorded gradients counts: one under `no_grad` saves nothing.
    A wrapped module that ran inside another is a part of that one. `.plans` and `.traces` of the
    report say how many were made in all steps, and `.budgets` what each budget is in bytes. Alike
    layers share a trace, which counts once.

    Raises `NoMatchError` (a `ValueError`) if nothing in `module` is wrapped, and `RuntimeError` if
    nothing that is wrapped has run yet.

    >>> import torch
    >>> model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    >>> _ = model(torch.ones(2, 4))
    >>> sorted({row.decision for row in report(model)})
    ['input', 'parameter', 'recomputed']
    """
    found = [(n, f) for n, m in module.named_modules() if (f := remat_forward_of(m)) is not None]
    if not found:
        raise NoMatchError(_describe_no_report(module))
    programs: list[tuple[str, FunctionProgram | TapeSummary]] = []
    for name, forward in found:
        program = forward.last_program
        if program is not None and not any(
            not outer or name.startswith(f"{outer}.") for outer, _ in programs
        ):
            programs.append((name, program))
    if not programs and any(name.startswith("_orig_mod") for name, _ in found):
        raise NoStepError(
            f"this {type(module).__name__} is compiled by torch.compile, and no report sees the "
            "steps that run in its graphs. Report a step of the model before it is compiled, or "
            "write torch.compile(model, backend='torchremat', options={'report': print})"
        )
    if not programs:
        names = ", ".join(name or type(module).__name__ for name, _ in found[:3])
        raise NoStepError(
            f"none of the {len(found)} wrapped modules ({names}{', ...' * (len(found) > 3)}) has "
            "run with gradients enabled: run a step, then ask for the report"
        )
    known = {id(t): t for _, f in found if (t := f.traces) is not None}.values()
    jobs: list[tuple[Policy, BudgetJob | TapeJob]] = [
        (p, p.job) for t in known for p in t.jobs.values() if isinstance(p, BudgetInJob)
    ]
    tapes = [tape for t in known for tape in t.tapes.values()]
    jobs += [(tape.policy, tape.job) for tape in tapes if tape.job is not None]
    return replace(
        report_of_programs(programs, labels_of_storages(module)),
        plans=sum(job.num_plans for _, job in jobs),
        traces=sum(t.num_made for t in known),
        budgets=tuple(dict.fromkeys(f"{p}: {job.describe()}" for p, job in jobs)),
    )
