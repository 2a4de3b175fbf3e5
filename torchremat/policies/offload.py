"""Policies that save values in the host's memory: JAX's two.

Source: `jax/_src/ad_checkpoint.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchremat.core.avals import Aval
from torchremat.errors import PolicyError, PolicyValueError, nearest_names
from torchremat.graph.ops import is_dot_with_no_batch_dims
from torchremat.policies.builtin import check_items
from torchremat.policies.policy import MATCHES_NOTHING, Policy, Value
from torchremat.policies.spelling import register_spelling, spell
from torchremat.policies.verdicts import Answer, NotSaved, Offloadable, Saveable, Verdict

__all__ = ["offload_dot_with_no_batch_dims", "save_and_offload_only_these_names"]

Place = str | torch.device

_USUAL = Offloadable("device", "pinned_host")


@dataclass(frozen=True, repr=False)
class OffloadDotWithNoBatchDims(Policy):
    verdict: Offloadable

    def __call__(self, op: object, /, *avals: Aval, **params: Any) -> Answer:
        return self.verdict if is_dot_with_no_batch_dims(op, *avals) else False

    @property
    def spelling(self) -> str | None:
        return "offload_dot_with_no_batch_dims" if self.verdict == _USUAL else None

    def __repr__(self) -> str:
        src, dst = self.verdict.src, self.verdict.dst
        return f"offload_dot_with_no_batch_dims({src!r}, {dst!r})"


def offload_dot_with_no_batch_dims(offload_src: Place, offload_dst: Place) -> Policy:
    """The results of matrix multiplications without batch dimensions may be saved on the host.

    The values of `dots_with_no_batch_dims_saveable` are copied to the host when they are computed,
    and back before the backward pass reads them. An output, which is alive anyway, stays.

    Args:
        offload_src: where values are: `"device"`, or a `torch.device`, to move those on it alone.
        offload_dst: where they go: `"pinned_host"`, or `torch.device("cpu")`.

    Raises:
        PolicyError, PolicyValueError: (a `TypeError`, a `ValueError`) for an unknown place.

    >>> import torch
    >>> policy = offload_dot_with_no_batch_dims("device", "pinned_host")
    >>> policy(torch.ops.aten.mm.default), policy(torch.ops.aten.bmm.default)
    (Offloadable(src='device', dst='pinned_host'), False)
    """
    return OffloadDotWithNoBatchDims(Offloadable(offload_src, offload_dst))


@dataclass(frozen=True, repr=False)
class SaveAndOffloadOnlyTheseNames(Policy):
    saved: tuple[str, ...]
    offloaded: tuple[str, ...]
    verdict: Offloadable

    def decide(self, value: Value) -> Verdict:
        # a value with a name of each kind is saved
        if not set(self.saved).isdisjoint(value.names):
            return Saveable()
        return NotSaved() if set(self.offloaded).isdisjoint(value.names) else self.verdict

    def find_unmatched(self, values: Sequence[Value]) -> list[str]:
        known = {name for value in values for name in value.names}
        return [
            f"{self!r}: {item!r}{MATCHES_NOTHING}. Of the names given by checkpoint_name, "
            f"{nearest_names(item, known)}"
            for item in (*self.saved, *self.offloaded)
            if item not in known
        ]

    @property
    def spelling(self) -> str | None:
        if self.saved or not self.offloaded or self.verdict != _USUAL:
            return None
        return spell("offload_names", self.offloaded)

    def __repr__(self) -> str:
        return (
            "save_and_offload_only_these_names("
            f"names_which_can_be_saved={list(self.saved)!r}, "
            f"names_which_can_be_offloaded={list(self.offloaded)!r}, "
            f"offload_src={self.verdict.src!r}, offload_dst={self.verdict.dst!r})"
        )


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: Place,
    offload_dst: Place,
) -> Policy:
    """Only values with a name (`checkpoint_name`) are saved: some on the device, some on the host.

    Outputs stay on the device, as with `offload_dot_with_no_batch_dims`.

    Args:
        names_which_can_be_saved: names of values that may be saved on the device.
        names_which_can_be_offloaded: names of values that may be saved on the host.
        offload_src: where they are: `"device"`, or a `torch.device`, to move those on it alone.
        offload_dst: where they go: `"pinned_host"`, or `torch.device("cpu")`.

    Raises:
        PolicyError: (a `TypeError`) for names that are no list of strings, or an unknown place.
        PolicyValueError: (a `ValueError`) for an empty name, one that is in both lists, or an
            unknown place.

    >>> from torchremat import name_p
    >>> policy = save_and_offload_only_these_names(
    ...     names_which_can_be_saved=["attn"], names_which_can_be_offloaded=["mlp"],
    ...     offload_src="device", offload_dst="pinned_host")
    >>> policy(name_p, name="attn"), policy(name_p, name="mlp"), policy(name_p, name="x")
    (True, Offloadable(src='device', dst='pinned_host'), False)
    """
    saved = _names("names_which_can_be_saved", names_which_can_be_saved)
    offloaded = _names("names_which_can_be_offloaded", names_which_can_be_offloaded)
    both = sorted(set(saved) & set(offloaded))
    if both:
        raise PolicyValueError(
            f"save_and_offload_only_these_names: {', '.join(map(repr, both))} would be both saved "
            "and offloaded. A name belongs in names_which_can_be_saved or in "
            "names_which_can_be_offloaded"
        )
    return SaveAndOffloadOnlyTheseNames(saved, offloaded, Offloadable(offload_src, offload_dst))


def _names(argument: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise PolicyError(
            f"save_and_offload_only_these_names({argument}={given!r}): it takes a list of names, "
            f"such as {argument}=['attn']"
        )
    return check_items("save_and_offload_only_these_names", "name", given)


def _offload_names(*names: str) -> Policy:
    return save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )


register_spelling("offload_dot_with_no_batch_dims", lambda: OffloadDotWithNoBatchDims(_USUAL))
register_spelling("offload_names", _offload_names, "attn,mlp")
