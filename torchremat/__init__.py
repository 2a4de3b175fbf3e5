"""torchremat: rematerialisation (activation checkpointing) for PyTorch, over traced graphs.
The package exports the public functions; its folders are described in `docs/architecture.md`.
Begin with `checkpoint`, in `remat/checkpoint.py`.

>>> import torch
>>> import torchremat as tr
>>> block = tr.checkpoint(lambda x, w: torch.tanh(x @ w), policy="dots")
>>> x, w = torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
>>> block(x, w).sum().backward()

`import torchremat` imports neither PyTorch nor the rooms: a name brings its room along when it is
first used. So the help of the command is quick, and a program waits only for what it uses.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchremat.tested_versions import warn_once_of_newer

if TYPE_CHECKING:
    from torchremat import (
        api_util,
        batching,
        checkpoint_policies,
        config,
        errors,
        measure,
        nn,
        optim,
        parallel,
        planning,
        testing,
        viz,
    )
    from torchremat.autodiff.jvp_graph import jvp_graph
    from torchremat.autodiff.transpose_graph import transpose_graph
    from torchremat.batching.batch_graph import batch_graph
    from torchremat.batching.collectives.exchange import (
        all_gather,
        all_to_all,
        ppermute,
        pshuffle,
        psum_scatter,
    )
    from torchremat.batching.collectives.reduce import (
        axis_index,
        axis_size,
        pmax,
        pmean,
        pmin,
        psum,
    )
    from torchremat.batching.custom_vmap import custom_vmap, sequential_vmap
    from torchremat.batching.vmap import vmap
    from torchremat.compile.jit.jit import jit
    from torchremat.derivatives.custom_jvp import custom_jvp
    from torchremat.derivatives.custom_vjp import custom_vjp
    from torchremat.derivatives.gradients import grad, jvp, value_and_grad, vjp
    from torchremat.derivatives.jacobians import hessian, jacfwd, jacrev
    from torchremat.derivatives.linearize import linear_transpose, linearize
    from torchremat.errors import (
        BudgetError,
        ConcretizationError,
        EffectError,
        NoMatchError,
        UnmatchedWarning,
    )
    from torchremat.loops.scan import scan
    from torchremat.loops.while_loop import while_loop
    from torchremat.nn.fit import fit
    from torchremat.parallel.devices import (
        device_count,
        devices,
        host_count,
        host_id,
        local_device_count,
        local_devices,
        process_count,
        process_index,
    )
    from torchremat.parallel.pmap import pmap
    from torchremat.planning.api import plan
    from torchremat.planning.estimate import estimate
    from torchremat.policies.checkpoint_name import checkpoint_name, name_p
    from torchremat.policies.policy import policy
    from torchremat.policies.verdicts import NotSaved, Offloadable, Recompute, Saveable
    from torchremat.remat.checkpoint import checkpoint
    from torchremat.remat.checkpoint import checkpoint as remat
    from torchremat.remat.op.make_graph import make_graph
    from torchremat.remat.op.partial_eval_graph import partial_eval_graph
    from torchremat.remat.op.remat_op import remat_p
    from torchremat.report.compare import compare
    from torchremat.report.explain import explain
    from torchremat.report.residuals import print_saved_residuals, saved_residuals
    from torchremat.typed_graph.dce import dce_graph
    from torchremat.typed_graph.typed_graph import TypedGraph, eval_graph

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ConcretizationError",
    "EffectError",
    "NoMatchError",
    "NotSaved",
    "Offloadable",
    "Recompute",
    "Saveable",
    "TypedGraph",
    "UnmatchedWarning",
    "all_gather",
    "all_to_all",
    "api_util",
    "axis_index",
    "axis_size",
    "batch_graph",
    "batching",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "compare",
    "config",
    "custom_jvp",
    "custom_vjp",
    "custom_vmap",
    "dce_graph",
    "device_count",
    "devices",
    "errors",
    "estimate",
    "eval_graph",
    "explain",
    "fit",
    "grad",
    "hessian",
    "host_count",
    "host_id",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "jvp_graph",
    "linear_transpose",
    "linearize",
    "local_device_count",
    "local_devices",
    "make_graph",
    "measure",
    "name_p",
    "nn",
    "optim",
    "parallel",
    "partial_eval_graph",
    "plan",
    "planning",
    "pmap",
    "pmax",
    "pmean",
    "pmin",
    "policy",
    "ppermute",
    "print_saved_residuals",
    "process_count",
    "process_index",
    "pshuffle",
    "psum",
    "psum_scatter",
    "remat",
    "remat_p",
    "saved_residuals",
    "scan",
    "sequential_vmap",
    "testing",
    "transpose_graph",
    "value_and_grad",
    "viz",
    "vjp",
    "vmap",
    "while_loop",
]


_HOMES = {
    "autodiff.jvp_graph": "jvp_graph",
    "autodiff.transpose_graph": "transpose_graph",
    "batching.batch_graph": "batch_graph",
    "batching.collectives.exchange": "all_gather all_to_all ppermute pshuffle psum_scatter",
    "batching.collectives.reduce": "axis_index axis_size pmax pmean pmin psum",
    "batching.custom_vmap": "custom_vmap sequential_vmap",
    "batching.vmap": "vmap",
    "compile.jit.jit": "jit",
    "derivatives.custom_jvp": "custom_jvp",
    "derivatives.custom_vjp": "custom_vjp",
    "derivatives.gradients": "grad jvp value_and_grad vjp",
    "derivatives.jacobians": "hessian jacfwd jacrev",
    "derivatives.linearize": "linear_transpose linearize",
    "errors": "BudgetError ConcretizationError EffectError NoMatchError UnmatchedWarning",
    "loops.scan": "scan",
    "loops.while_loop": "while_loop",
    "nn.fit": "fit",
    "parallel.devices": "device_count devices host_count host_id local_device_count local_devices "
    "process_count process_index",
    "parallel.pmap": "pmap",
    "planning.api": "plan",
    "planning.estimate": "estimate",
    "policies.checkpoint_name": "checkpoint_name name_p",
    "policies.policy": "policy",
    "policies.verdicts": "NotSaved Offloadable Recompute Saveable",
    "remat.checkpoint": "checkpoint",
    "remat.op.make_graph": "make_graph",
    "remat.op.partial_eval_graph": "partial_eval_graph",
    "remat.op.remat_op": "remat_p",
    "report.compare": "compare",
    "report.explain": "explain",
    "report.residuals": "print_saved_residuals saved_residuals",
    "typed_graph.dce": "dce_graph",
    "typed_graph.typed_graph": "TypedGraph eval_graph",
}
"""The modules of the names in `__all__` that are no module themselves."""

_home_of = {name: home for home, names in _HOMES.items() for name in names.split()}


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # to a type checker, any name would be there

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = _home_of.get(name)
        module = import_module(f"{__name__}.{home or name}")
        found = globals()[name] = getattr(module, name) if home else module
        return found


class _Package(ModuleType):
    """The package, whose `remat` is the function, though there is a folder of that name."""

    @property
    def remat(self) -> Any:
        return self.checkpoint

    @remat.setter
    def remat(self, folder: ModuleType) -> None:
        """Python sets it when the folder is imported."""


sys.modules[__name__].__class__ = _Package
if "torch" in sys.modules:  # else once it is
    warn_once_of_newer()
