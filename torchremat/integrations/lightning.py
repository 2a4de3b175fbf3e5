"""A callback for the trainers of `lightning` and `pytorch_lightning`: a policy or a budget.

    trainer = lightning.Trainer(callbacks=[RematCallback(budget="8GiB")])

The callback is a class of the package that is imported already, else of the one that is installed.
It serves the trainers of both.
"""

import sys
from importlib import import_module
from typing import Any

from torch import nn

from torchremat.errors import OptionError
from torchremat.integrations.callback import SessionCallback
from torchremat.integrations.training_only import TrainingPolicy, remove
from torchremat.policies.module_selection import has_forward
from torchremat.policies.policy import Policy

__all__ = ["RematCallback"]


def __dir__() -> list[str]:
    return sorted(__all__)


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> Any:
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):  # installed, and broken
                raise
    raise ImportError(
        "torchremat.integrations.lightning needs lightning (or pytorch_lightning), which is not "
        "installed: pip install lightning"
    )


class RematCallback(SessionCallback, _callback_class()):  # type: ignore[misc]
    """Put a policy or a budget on a module for the time that a trainer fits it.

    The report of the first step and the measured peak of the second are logged: a line each on the
    logger `torchremat` (INFO; the whole report at DEBUG), and in the trainer's own metrics
    `remat_saved_bytes`, `remat_recomputed_bytes` and `remat_peak_bytes`. At the end, and after an
    error, the module is as it was.

    Without `select` the model is meant: the only submodule with parameters, as in
    `self.model = ...`, else the `LightningModule` itself, if it has a `forward`. The policy does
    not reach a loss that `training_step` computes after the model has run.

    Args:
        policy: what may be saved: a policy, its spelling, or a dict from selections to those.
        budget: instead of it bytes of peak memory, as `memory_budget` takes them.
        select: the submodules that it is for, as `torchremat.nn.wrap` takes it.

    Attributes:
        report: the report of the first step.
        peak_bytes: the most bytes alive at one time that the second step's forward and backward
            passes allocated.

    Raises:
        OptionError: (a `ValueError`) unless one of `policy` and `budget` is given.

    >>> RematCallback("dots", select="model.layers.*").policy
    dots_saveable
    """

    _logged: dict[str, int]

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Put the policy on the model."""
        model = pl_module
        if self._session.select is None and isinstance(self.policy, Policy):
            model = _model_in(pl_module)
        self._logged = {}
        applied = TrainingPolicy(self.policy, self._session.select)
        self._session.begin(model, lambda: applied.apply_to(model), lambda: remove(model))

    def on_train_batch_start(
        self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int
    ) -> None:
        """A step begins."""
        self._session.step_begins()

    def on_before_optimizer_step(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        """The gradients of a step are there."""
        self._session.passes_end()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is over."""
        self._session.step_ends()
        figures = self._session.figures()
        if figures != self._logged:
            self._logged = figures
            pl_module.log_dict({name: float(nbytes) for name, nbytes in figures.items()})

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Leave the model as it was."""
        self._session.end()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Leave the model as it was."""
        self._session.end()

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Leave the model as it was."""
        self._session.end()


def _model_in(module: nn.Module) -> nn.Module:
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    if len(children) == 1 and has_forward(children[0]):
        return children[0]
    if has_forward(module) and not _is_of_the_library(type(module).forward):
        return module
    names = ", ".join(name for name, _ in module.named_children())
    raise OptionError(
        f"RematCallback: which module of {type(module).__name__} is the model? It has no forward, "
        f"and in it are {names or 'none'}: name what to checkpoint with select="
    )


def _is_of_the_library(forward: Any) -> bool:
    return str(forward.__module__).startswith(("lightning.", "pytorch_lightning."))
