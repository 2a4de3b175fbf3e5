"""Times of single operators: run on random tensors, timed, and cached on disk."""

import json
import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.accelerators import is_here, read_free_bytes
from torchremat.planning.costs.measured_rates import cache_file, on_real_tensors, time_call
from torchremat.planning.costs.op_signature import Layout, Opaque, OpSignature, Place

_logger = logging.getLogger("torchremat")

# Run by one process alone they would wait for the others.
_COLLECTIVES = ("c10d", "symm_mem", "fsdp", "dtensor", "dist")


@dataclass(frozen=True)
class NodeTimer:
    """Times calls of operators on a device of this machine.

    The times are cached in a file of lines of JSON, one a call, beside the rates of `measure`.

    >>> timer = NodeTimer(torch.device("cpu"))
    >>> timer == NodeTimer(torch.device("cpu"))
    True
    """

    device: torch.device
    _times: dict[OpSignature, float | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _kept: dict[Path, dict[str, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def seconds(self, call: OpSignature) -> float | None:
        """The time that `call` takes; `None` if it cannot be run on random tensors."""
        if call not in self._times:
            self._times[call] = self._load_or_measure(call)
        return self._times[call]

    def _load_or_measure(self, call: OpSignature) -> float | None:
        path = cache_file("operators", self.device, ".jsonl")
        if path not in self._kept:
            self._kept[path] = _read(path)
        key = _key(call)
        if key in self._kept[path]:
            return self._kept[path][key]
        seconds = self._measure(call)
        if seconds is not None:  # what cannot be run today may be run on a day with more memory
            self._kept[path][key] = seconds
            _append(path, key, seconds)
        return seconds

    def _measure(self, call: OpSignature) -> float | None:
        reason = _why_not(call, self.device)
        if reason is None:
            try:
                with on_real_tensors(self.device):
                    inputs = [_random(layout, self.device) for layout in call.inputs]
                    args = [_fill_argument(a, inputs, self.device) for a in call.args]
                    kwargs = {n: _fill_argument(a, inputs, self.device) for n, a in call.kwargs}
                    seconds = time_call(lambda: call.target(*args, **kwargs), self.device)
                if math.isfinite(seconds) and seconds > 0:
                    return seconds
                reason = f"the clock said {seconds} s"
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        _logger.debug("%s is not timed, but estimated by the roofline: %s", call.target, reason)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return NodeTimer, (self.device,)


def _why_not(call: OpSignature, device: torch.device) -> str | None:
    if not isinstance(call.target, _torch.OpOverload):
        return "it is not an operator"
    if any(word in call.target.namespace for word in _COLLECTIVES):
        return "it needs other processes"
    if _has_opaque((call.args, call.kwargs)):
        return "it has an argument that is not a tensor, number or the like"
    layouts = [*call.tensors(), *call.outputs()]
    if any(0 in layout.shape for layout in layouts):
        return "it has a tensor without elements, where no index is in range"
    needed = sum(layout.span * layout.dtype.itemsize for layout in layouts)
    free = _free_bytes(device)
    if needed > free / 4:
        return f"it needs {needed} bytes, and {free} are free"
    return None


def _has_opaque(value: Any) -> bool:
    if type(value) is tuple:
        return any(map(_has_opaque, value))
    return isinstance(value, Opaque)


def _free_bytes(device: torch.device) -> float:
    if is_here(device) and (free := read_free_bytes(device)) is not None:
        return free
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # macOS and Windows do not tell
        return 8 << 30


def _random(layout: Layout | None, device: torch.device) -> Tensor | None:
    """A tensor with such a layout; zeros where it is of integers, which may be indices."""
    if layout is None:
        return None
    memory = torch.zeros(layout.span, dtype=layout.dtype, device=device)
    if layout.dtype.is_floating_point and layout.dtype.itemsize > 1:
        memory.uniform_(0.1, 1.0)
    elif layout.dtype.is_complex:
        torch.view_as_real(memory).uniform_(0.1, 1.0)
    return memory.as_strided(layout.shape, layout.stride)


def _fill_argument(value: Any, inputs: list[Tensor | None], device: torch.device) -> Any:
    if isinstance(value, Place):
        return inputs[value.index]
    if isinstance(value, torch.device):
        return device
    if type(value) is tuple:
        return [_fill_argument(v, inputs, device) for v in value]
    return value


def _key(call: OpSignature) -> str:
    return repr((str(call.target), call.args, call.kwargs, call.inputs))


def _read(path: Path) -> dict[str, float]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _logger.warning("%s has no times that can be read: %s", path, error)
        return {}
    times: dict[str, float] = {}
    for line in lines:
        try:
            key, seconds = json.loads(line)
            if not isinstance(key, str) or not seconds > 0:
                raise ValueError("no time")
            times[key] = float(seconds)
        except (ValueError, TypeError):
            _logger.warning("%s has a line that is no time, which is left out: %.60r", path, line)
    return times


def _append(path: Path, key: str, seconds: float) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, seconds]) + "\n")
    except OSError as error:
        _logger.warning("times cannot be kept in %s: %s", path, error)
