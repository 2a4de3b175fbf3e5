"""The backend of `torch.compile` in which a policy decides what is saved for the backward pass.

    torch.compile(model, backend="torchremat", options={"policy": "dots"})

Dynamo captures the program, with its guards, graph breaks and changing shapes. AOTAutograd
traces the joint graph, the policy says where it is cut, and inductor compiles both halves.
"""

import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.joint import Joint
from torchremat.compile.device_support import lacks_triton, warn_of_triton
from torchremat.compile.dynamo.fragments import FragmentJob, job_of
from torchremat.compile.dynamo.inductor_decompositions import (
    decompose_for_inductor,
    find_random_decompositions,
)
from torchremat.compile.dynamo.partition import (
    cut_as_scheduled,
    cut_for_fusion,
    cut_joint,
    decide,
    partition_as_autograd_does,
    partition_as_pytorch_does,
    trace_joint,
)
from torchremat.compile.dynamo.reports import build_report
from torchremat.compile.dynamo.scheduled_joint import may_fuse
from torchremat.errors import OptionError, TorchrematError, nearest_names
from torchremat.graph.codegen import compile_graph
from torchremat.planning.budget_policy import MemoryBudget
from torchremat.policies.builtin import everything_saveable
from torchremat.policies.checkpoint_name import record_names
from torchremat.policies.policy import Policy, PolicyLike, as_policy
from torchremat.report.report import Report

__all__ = ["torchremat"]


def __dir__() -> list[str]:
    return sorted(__all__)


CODEGENS = ("inductor", "eager")
OWN_OPTIONS = ("policy", "codegen", "report", "mode")
# A value that is computed of three others and read twice or more is written to memory, as the plan
# counts it. Inductor by itself recomputes it for each reader, of up to four others, all of which
# then stay alive.
_WRITTEN_ONCE = {"realize_reads_threshold": 2}


@dataclass(frozen=True)
class BackendOptions:
    """The options of `torch.compile(..., options=)`, checked.

    Attributes:
        policy: what is saved; `None` leaves it to the checkpoints inside, and else to PyTorch.
        codegen: what runs the graphs: "inductor", or "eager" for one operator after the other.
        report: called with the `Report` of each graph that is compiled for a backward pass, if a
            policy decides.
    """

    policy: Policy | None = None
    codegen: str = "inductor"
    report: Callable[[Report], object] | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, mode: str | None = None) -> "BackendOptions":
        """Read `options`; raise `OptionError` for an unknown key, or a value of the wrong kind."""
        rest: dict[Any, Any] = {"mode": mode} | dict(options or {})
        policy = rest.pop("policy", None)
        codegen = rest.pop("codegen", "inductor")
        report = rest.pop("report", None)
        if codegen not in CODEGENS:
            raise OptionError(
                f"codegen={codegen!r} is not a code generator; "
                f"{nearest_names(str(codegen), CODEGENS)}"
            )
        if report is not None and not callable(report):
            raise OptionError(f"report={report!r} is not callable: it is called with each Report")
        settings = _read_mode(rest.pop("mode"))
        settings |= dict(_read_setting(key, value) for key, value in rest.items())
        return cls(_read_policy(policy), codegen, report, settings)


def _read_policy(given: PolicyLike | None) -> Policy | None:
    try:
        return None if given is None else as_policy(given)
    except OSError as error:  # the file of a plan
        raise OptionError(f"options={{'policy': {given!r}}} cannot be read: {error}") from error


def _read_mode(mode: str | None) -> dict[str, Any]:
    if mode in (None, "default"):
        return {}
    modes = _torch.inductor_modes()
    if mode not in modes:
        raise OptionError(
            f"mode={mode!r} is not a mode of torch.compile; {nearest_names(str(mode), modes)}"
        )
    return dict(modes[mode])


def _read_setting(key: object, value: object) -> tuple[str, object]:
    name = str(key).replace("-", "_")
    if name in ("budget", "activation_memory_budget"):
        raise OptionError(
            f"options={{{key!r}: {value!r}}} is not an option of the backend 'torchremat': a "
            f"budget is a policy, options={{'policy': memory_budget({value!r})}}"
        )
    known = _torch.inductor_option_names()
    if name not in known:
        names = [*OWN_OPTIONS, *get_close_matches(name, known)]
        raise OptionError(
            f"options={{{key!r}: ...}} is not an option of the backend 'torchremat', "
            f"{nearest_names(name, names)}. There are "
            f"{', '.join(map(repr, OWN_OPTIONS))} and the settings of inductor"
        )
    kind = _torch.inductor_option_type(name)
    if kind is not None and not isinstance(value, kind):
        raise OptionError(
            f"options={{{key!r}: {value!r}}}: this setting of inductor is "
            f"{getattr(kind, '__name__', kind)}, not {type(value).__name__}"
        )
    return name, value


def torchremat(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile what Dynamo captured: the backend `"torchremat"` of `torch.compile`.

    Args:
        module: the captured graph.
        inputs: fake tensors and sizes that stand for its arguments.
        options: `"policy"`, whatever `tr.checkpoint` takes as one; `"codegen"`, `"inductor"` or
            `"eager"`; `"mode"`, one of `torch.compile`'s; and settings of inductor.
        mode: `torch.compile(..., mode=)`.

    Raises:
        OptionError: (a `ValueError`) for an unknown option, with the nearest names.
        PolicyError, PolicyValueError: for a policy that is none.

    >>> import torch
    >>> @torch.compile(backend="torchremat", options={"policy": "full", "codegen": "eager"})
    ... def f(x):
    ...     return x.sin().cos().sum()
    >>> x = torch.ones(3, requires_grad=True)
    >>> f(x).backward()
    >>> bool(torch.allclose(x.grad, -torch.sin(torch.sin(x)) * torch.cos(x)))
    True
    """
    try:
        return _compile_chosen(module, inputs, BackendOptions.of(options, mode), options)
    except TorchrematError as error:
        raise _torch.to_user(error, sys._getframe()) from error.__cause__


def _compile_chosen(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    chosen: BackendOptions,
    options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    if chosen.codegen == "inductor" and lacks_triton(module):
        warn_of_triton("the backend 'torchremat'", "options={'codegen': 'eager'}")
        chosen = replace(chosen, codegen="eager")
    if not _differentiates(inputs) or _suits_pytorch(module, chosen):
        return _compile_as_pytorch_does(module, inputs, chosen)
    policy = chosen.policy
    if options is None or not isinstance(policy, MemoryBudget) or policy.budget is None:
        return _compile_for(module, inputs, chosen)

    def compile_with(
        module: fx.GraphModule, inputs: Sequence[Any], policy: Policy
    ) -> Callable[..., Any]:
        return _compile_for(module, inputs, replace(chosen, policy=policy))

    def trace(module: fx.GraphModule, inputs: Sequence[Any]) -> Joint | None:
        with record_names():
            return trace_joint(module, inputs)

    fuses = chosen.codegen == "inductor"
    job = job_of(options, lambda: FragmentJob(policy, trace, fuses=fuses))
    return job.add(module, inputs, compile_with)


def _compile_for(
    module: fx.GraphModule, inputs: Sequence[Any], chosen: BackendOptions
) -> Callable[..., Any]:
    if _suits_pytorch(module, chosen):
        return _compile_as_pytorch_does(module, inputs, chosen)
    with record_names():
        return _compile(module, inputs, chosen)


def _suits_pytorch(module: fx.GraphModule, chosen: BackendOptions) -> bool:
    """Whether PyTorch's partition does: no policy, or inductor saves all, no checkpoint inside."""
    if chosen.policy is None:
        return True
    inner = torch.ops.higher_order.tag_activation_checkpoint
    return (
        chosen.policy == everything_saveable
        and chosen.codegen == "inductor"
        and chosen.report is None
        and not any(node.target is inner for node in module.graph.nodes)
    )


def _compile_as_pytorch_does(
    module: fx.GraphModule, inputs: Sequence[Any], chosen: BackendOptions
) -> Callable[..., Any]:
    if chosen.codegen == "eager":
        return _torch.aot_autograd(
            module, inputs, compiler=compile_graph, partition=partition_as_autograd_does
        )
    key = f"torchremat {_version()}, no policy"
    partitioner = _torch.inductor_partitioner(partition_as_pytorch_does, key)
    config = {**chosen.inductor, "custom_partitioner_fn": partitioner}
    return _torch.compile_fx(module, inputs, config=config)


def _compile(
    module: fx.GraphModule, inputs: Sequence[Any], chosen: BackendOptions
) -> Callable[..., Any]:
    assert chosen.policy is not None
    cut = _Cut(chosen.policy, chosen.codegen, chosen.report)
    if chosen.codegen == "eager":
        return _torch.aot_autograd(module, inputs, compiler=compile_graph, partition=cut)
    partitioner = _torch.inductor_partitioner(cut, _cache_key(chosen))
    is_planned = chosen.policy.is_whole_graph
    return _torch.compile_fx(
        module,
        inputs,
        config={
            **(_WRITTEN_ONCE if is_planned else {}),
            **chosen.inductor,
            "custom_partitioner_fn": partitioner,
        },
        decompositions=find_random_decompositions(),
        keeps_as_cut=True,
        may_fuse=may_fuse if is_planned else None,
    )


@dataclass(frozen=True)
class _Cut:
    policy: Policy
    codegen: str
    report: Callable[[Report], object] | None

    def __call__(
        self, module: fx.GraphModule, inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        is_eager = self.codegen == "eager"
        num_outputs = options["num_fwd_outputs"]
        partition = decide(module, num_outputs, self.policy, fuses=not is_eager)
        if self.report is not None:
            self.report(build_report(partition))
        if self.policy.is_whole_graph:
            scheduled = cut_as_scheduled(partition, inputs, fuses=not is_eager, **options)
            if scheduled is not None:
                return scheduled
        if is_eager:
            return cut_joint(partition, inputs, **options)
        if self.policy == everything_saveable or self.policy.is_whole_graph:
            return cut_for_fusion(partition, inputs, **options)
        forward, backward = cut_joint(partition, inputs, **options)
        return decompose_for_inductor(forward), decompose_for_inductor(backward)


def _differentiates(inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(getattr(i, "requires_grad", False) for i in inputs)


_unique_numbers = itertools.count()


def _cache_key(chosen: BackendOptions) -> str:
    """The key of compiled graphs: equal for equal policies, in other processes too.

    It is a new one each time, so that the graph is cut anew, where a report is wanted. It also is
    for a policy without a spelling, and for one in a file, which may change. With tiles it is, too:
    a compiled graph calls them by a name that only this process has.
    """
    spelling = None if chosen.policy is None else chosen.policy.spelling
    is_cut_anew = chosen.report is not None or (chosen.policy or everything_saveable).wants_tiles
    if spelling is None or spelling.startswith("plan:") or is_cut_anew:
        return f"torchremat {_version()}, {os.getpid()}, {next(_unique_numbers)}"
    assumed = _torch.find_assumed_sizes()  # for which a budget decides
    return f"torchremat {_version()}, {spelling}{'' if assumed is None else f', {assumed}'}"


@functools.cache
def _version() -> str:
    """A digest of the sources of this package: other code may cut a graph otherwise."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
