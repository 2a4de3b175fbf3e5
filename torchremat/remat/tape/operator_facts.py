"""Facts about operators that a recorder needs, from their schemas."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torchremat import _torch
from torchremat.autodiff.replay_rules import is_random
from torchremat.graph.ops import packet_name
from torchremat.remat.program.random_replay import find_replayed

# They read nothing of their tensor arguments but the layout.
_LIKE = frozenset(
    f"aten.{name}"
    for name in (
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "randint_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
    )
)  # fmt: skip

_UNINITIALISED = frozenset(
    f"aten.{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
        "resize_", "resize_as_",
    )
)  # fmt: skip

# They overwrite all of `self`, and do not read it.
_OVERWRITING = frozenset(
    f"aten.{name}_"
    for name in (
        "fill", "zero", "copy", "bernoulli", "normal", "uniform", "exponential", "random",
        "log_normal", "cauchy", "geometric",
    )
)  # fmt: skip

# Batch norms write to running statistics, which their schemas do not say.
_STATISTICS = {
    "aten.native_batch_norm": (3, 4),
    "aten.cudnn_batch_norm": (3, 4),
    "aten.miopen_batch_norm": (3, 4),
    "aten.batch_norm_gather_stats": (3, 4),
    "aten.batch_norm_gather_stats_with_counts": (3, 4),
}


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    is_view: bool = False
    """Whether it computes nothing: it looks at an argument through another geometry."""
    is_pure: bool = False
    """Whether it computes its results of the values of its arguments, and does nothing else."""
    is_like: bool = False
    is_uninitialised: bool = False
    is_random: bool = False
    replayed_by: Any = None
    """The overload that draws again what it drew from a generator's state, if there is one."""
    written: frozenset[int | str] = frozenset()
    """Positions and names of the arguments that it writes to."""
    overwritten: frozenset[int | str] = frozenset()
    """The ones among them that it does not read."""
    statistics: tuple[int, ...] = ()
    """Positions of running statistics, which it writes to in training."""
    training: int | None = None
    """The position of the argument that says whether it is training; without one it is."""
    makes_more: bool = False
    """Whether it writes to arguments and also returns something new."""
    options: frozenset[str] = frozenset()
    """`dtype` and `device`, if it takes them."""
    is_known: bool = True
    """Whether a schema says what it writes to."""


_VIEWS = OperatorFacts(is_view=True)


def updates_statistics(facts: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes to running statistics; one that does not reads them."""
    if not facts.statistics or facts.training is None:
        return bool(facts.statistics)
    return bool(args[facts.training] if len(args) > facts.training else kwargs.get("training"))


@cache
def facts_of(op: Any) -> OperatorFacts:
    if not isinstance(op, _torch.OpOverload):
        return OperatorFacts(is_known=False)
    schema = _torch.schema_of(op)
    written: set[int | str] = set()
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {i, argument.name}
    aliases = [result.alias_info is not None for result in schema.returns]
    name = packet_name(op)
    is_view = not written and bool(aliases) and all(aliases)
    if is_view or name == "aten.set_":
        return _VIEWS
    overwritten: set[int | str] = set()
    if name in _OVERWRITING:
        overwritten = {0, "self"}
    elif "out" in written:
        overwritten = written
    draws = is_random(op)
    statistics = _STATISTICS.get(name, ())
    is_special = name in _LIKE or name in _UNINITIALISED
    return OperatorFacts(
        is_pure=not (written or draws or statistics or is_special),
        is_like=name in _LIKE,
        is_uninitialised=name in _UNINITIALISED,
        is_random=draws,
        replayed_by=find_replayed(op) if draws else None,
        written=frozenset(written),
        overwritten=frozenset(overwritten),
        statistics=statistics,
        training=next((i for i, a in enumerate(schema.arguments) if a.name == "training"), None),
        makes_more=bool(written) and not all(aliases),
        options=frozenset(a.name for a in schema.arguments) & {"dtype", "device"},
    )


REPLAYABLE = (
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Generator,
)  # fmt: skip
"""Arguments that mean the same later."""

NUMBERS = frozenset((int, float, bool, complex, type(None)))

_PLAIN = (Tensor, nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a part of a storage and nothing else."""
    if type(tensor) not in _PLAIN and _torch.is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def fills_its_storage(tensor: Tensor) -> bool:
    """Whether an operator that writes to all of `tensor` writes to all of its storage."""
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among the results of an operator, or in a list of arguments, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def default_device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Where an operator draws its random numbers."""
    found = tensors_in(args)
    device = kwargs.get("device")
    if device is None:
        device = found[0].device if found else torch.get_default_device()
    return torch.device(device)
