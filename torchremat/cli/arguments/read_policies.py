"""Policies, budgets, selections and optimizers as the command line gives them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import nn

from torchremat.cli.arguments.targets import Target, load_target
from torchremat.cli.arguments.user_modules import find_name, split_target
from torchremat.cli.terminal.output import check_pages, check_writable, show_progress_of
from torchremat.errors import TorchrematError
from torchremat.planning.budget import Budget
from torchremat.planning.memory.resident_bytes import find_optimizer
from torchremat.policies.module_selection import select_modules
from torchremat.policies.policy import Policy, policy
from torchremat.remat.module_policies import under_policy


@contextmanager
def option_errors(option: str) -> Iterator[None]:
    """In the block an error of a value or a file is one of the command's `option`."""
    try:
        yield
    except (TorchrematError, OSError) as error:
        if not isinstance(error, ValueError | TypeError | OSError):
            raise
        raise click.BadParameter(_describe_error(error), param_hint=f"'{option}'") from error


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def read_policy(text: str) -> Policy:
    """The policy that `text` spells; `click.BadParameter` if none.

    >>> read_policy("dots|names:attn")
    dots_saveable | save_only_these_names('attn')
    """
    with option_errors("--policy"):
        return policy(text)


def check_budget(text: str) -> None:
    """`click.BadParameter` if `text` is not a budget."""
    with option_errors("--budget"):
        Budget.of(text)


def read_policies(policies: Sequence[str], budgets: Sequence[str]) -> dict[str, Policy]:
    """Policies by what the user calls them.

    Raises `click.UsageError` if there are none.

    >>> list(read_policies(["full", "dots"], ["50%"]))
    ['full', 'dots', 'budget:50%']
    """
    for budget in budgets:
        check_budget(budget)
    texts = [*policies, *(f"budget:{budget}" for budget in budgets)]
    if not texts:
        raise click.UsageError(
            "there is nothing to set beside plain PyTorch: give --policy or --budget, "
            "each as often as you like"
        )
    return {text: read_policy(text) for text in texts}


def read_one_policy(
    policy_text: str | None, budget: str | None, select: str | None
) -> Policy | None:
    """The policy of `--policy` or `--budget`, of which one may be given; `None` without both."""
    if policy_text is not None and budget is not None:
        raise click.UsageError("--policy and --budget are two policies: give one of them")
    if policy_text is None and budget is None:
        if select is not None:
            raise click.UsageError("--select says where a policy goes: give --policy or --budget")
        return None
    texts = [policy_text] if policy_text is not None else []
    return next(iter(read_policies(texts, [budget] if budget is not None else []).values()))


@dataclass(frozen=True)
class OnePolicyOptions:
    """The options of a command that looks at a target under one policy at most."""

    target: str
    policy: str | None = None
    budget: str | None = None
    select: str | None = None
    device: str | None = None
    html: str | None = None
    json_path: str | None = None

    def load(self) -> tuple[Target, Policy | None]:
        chosen = read_one_policy(self.policy, self.budget, self.select)
        check_writable(json=self.json_path)
        check_pages(self.html)
        with show_progress_of(f"loading {self.target}"):
            return load_target(self.target, self.device), chosen


def apply_policy(target: Target, chosen: Policy | None, select: str | None) -> Callable[..., Any]:
    """The target's function, under the policy if there is one."""
    if chosen is None:
        return target.fun
    check_select(target, select)
    return under_policy(target.fun, chosen, select)


def check_select(target: Target, select: str | None) -> None:
    """`click.BadParameter` if `--select` does not select modules of the target."""
    if select is None:
        return
    if not isinstance(target.fun, nn.Module):
        raise click.BadParameter(
            f"it picks modules of a model, and {target.text} is a function", param_hint="'--select'"
        )
    try:
        select_modules(target.fun, select)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--select'") from error


def read_optimizer(text: str | None) -> type[torch.optim.Optimizer] | None:
    """The class of optimizers of that name, of `torch.optim` or as `package.module:Class`.

    >>> read_optimizer("adamw").__name__
    'AdamW'
    """
    if text is None:
        return None
    if ":" in text:
        found: Any = find_name(*split_target(text))[1]
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
            return found
        raise click.BadParameter(f"{text} is not an optimizer's class", param_hint="'--optimizer'")
    try:
        return find_optimizer(text)
    except ValueError as error:
        raise click.BadParameter(
            f"{error}. Another is given as package.module:Class", param_hint="'--optimizer'"
        ) from error
