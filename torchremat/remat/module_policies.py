"""Assign policies to modules of a model, and copy a model with its modules under them."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torchremat.core.source import name_of
from torchremat.errors import ArgumentTypeError, ArgumentValueError
from torchremat.policies.module_selection import Select, select_modules
from torchremat.policies.policy import Policy, PolicyLike, as_policy
from torchremat.remat.checkpoint import checkpoint
from torchremat.remat.module_forward import RematForward
from torchremat.tracing.modules.parallel_kind import parallel_kind

PolicyByPattern = Mapping[Select, PolicyLike | None]


def under_policy(
    f: Callable[..., Any], policy: PolicyLike | None, select: Select | None
) -> Callable[..., Any]:
    """`f` under `policy`, as a whole or each of the modules that `select` means.

    A model stays as it is: what is selected is in a copy with the same parameters and buffers.
    Raises as `nn.wrap` does.
    """
    if select is None:  # what it decides here is for this step, not for a job that runs `f`
        fun: Callable[..., Any] = checkpoint(f, policy=as_policy(policy).begin_job())
        return fun
    if not isinstance(f, nn.Module):
        raise ArgumentTypeError(
            f"select={select!r} picks modules of an nn.Module, and {name_of(f)} is none. Give the "
            "model itself, or put the policy on its modules with torchremat.nn.wrap first"
        )
    assigned = assign_policies(f, policy, select)
    model = copy_with_same_state(f)
    for name, _, chosen in assigned:
        module = model.get_submodule(name)
        RematForward(module, name, chosen.begin_job(), True).install()
    return model


def copy_with_same_state(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def assign_policies(
    module: nn.Module, policy: PolicyLike | PolicyByPattern | None, select: Select | None
) -> list[tuple[str, nn.Module, Policy]]:
    assigned = _pair_policies(module, policy, select)
    for name, submodule, _ in assigned:
        _check_traceable(name, submodule)
    return assigned


def _pair_policies(
    module: nn.Module, policy: PolicyLike | PolicyByPattern | None, select: Select | None
) -> list[tuple[str, nn.Module, Policy]]:
    if not isinstance(policy, Mapping):
        chosen = as_policy(policy)
        return [(name, found, chosen) for name, found in select_modules(module, select)]
    if select is not None:
        raise ArgumentValueError(
            f"select={select!r} and a dict of policies both say which modules are meant; leave out "
            "select, whose ',' and '!' the keys of the dict have too"
        )
    if not policy:
        raise ArgumentValueError(
            "the dict of policies is empty: give it a pattern, {'layers.*': 'dots'}"
        )
    assigned: dict[int, tuple[str, nn.Module, Policy]] = {}
    for pattern, value in policy.items():
        chosen = as_policy(value)
        if pattern is None:
            raise ArgumentTypeError(
                "the keys of a dict of policies are patterns, but one of them is None"
            )
        found = select_modules(module, pattern)
        left = [pair for pair in found if id(pair[1]) not in assigned]
        if not left:
            raise ArgumentValueError(
                f"{pattern!r}: {chosen!r} has no effect: keys before it match {found[0][0]!r} and "
                "all else that it matches. Write the narrower pattern first"
            )
        assigned |= {id(found): (name, found, chosen) for name, found in left}
    return list(assigned.values())


def _check_traceable(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    called = f"{name!r} ({kind})" if name else f"the {kind}"
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            f"{called} is compiled by TorchScript, so there is no Python to trace: wrap the module "
            "that it was made from"
        )
    for path, inner in module.named_modules():
        inner_kind = parallel_kind(inner)
        if inner_kind is not None and (inner is not module or "fully_shard" not in inner_kind):
            place = f"{path!r} in it" if path else "it"
            raise ArgumentTypeError(
                f"{called} cannot be traced as a whole, since {place} {inner_kind}, which works "
                "between modules: wrap the modules inside, torchremat.nn.wrap(model, policy, "
                "select='layers.*') say, or the model that a DistributedDataParallel is made from. "
                "torchremat.nn.split_budget makes one budget into policies for layers"
            )
    if "_orig_mod" in dict(module.named_children()):
        raise ArgumentTypeError(
            f"{called} is a module compiled by torch.compile: wrap the module that it was made "
            "from, or in it, before it is compiled"
        )
