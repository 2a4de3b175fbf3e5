"""The costs of a compiled training step: seconds, bytes saved between its passes, peak bytes."""

import contextlib
import json
import os
import statistics
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch._inductor.utils
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

Loss = Callable[..., Tensor]
WARM_UPS = 2


@dataclass
class Variant:
    """One way to compile a model, and what was measured of it.

    Attributes:
        name: of the row.
        is_ours: whether our backend compiled it.
        module: whose parameters get gradients.
        loss: the compiled function.
        compile_seconds: of the first step, compilation included.
        saved_bytes: of storages saved between the passes, without parameters and arguments.
        peak_bytes: the most that a step allocates at a time, gradients included.
        seconds: of each timed step.
    """

    name: str
    is_ours: bool
    module: nn.Module
    loss: Loss
    compile_seconds: float
    saved_bytes: int = 0
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """The figures, with median and quartiles of the time."""
        quartiles = [0.0] * 3
        if len(self.seconds) > 1:
            quartiles = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return {
            "name": self.name,
            "is_ours": self.is_ours,
            "compile_seconds": self.compile_seconds,
            "saved_bytes": self.saved_bytes,
            "peak_bytes": self.peak_bytes,
            "seconds": quartiles[1],
            "quartiles": [quartiles[0], quartiles[2]],
            "least_seconds": min(self.seconds, default=0.0),
            "rounds": len(self.seconds),
        }


class Subject:
    """A model with arguments, of which variants are compiled and timed."""

    def __init__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.module, self.args = module, args
        self.device = args[0].device

    def compile(
        self, name: str, module: nn.Module | None = None, *, is_ours: bool = False, **how: Any
    ) -> Variant:
        """Compile `module`, by default the model, with `torch.compile(..., **how)`."""
        module = self.module if module is None else module
        loss = torch.compile(_own_code(module), dynamic=False, **how)
        variant = Variant(name, is_ours, module, loss, 0.0)
        started = time.perf_counter()
        self.step(variant)
        variant.compile_seconds = time.perf_counter() - started
        return variant

    def step(self, variant: Variant) -> float:
        """Run one step that finds no gradients, and give its seconds."""
        variant.module.zero_grad(set_to_none=True)
        loss = variant.loss
        if self.device.type == "cpu":
            started = time.perf_counter()
            loss(*self.args).backward()
            return time.perf_counter() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        loss(*self.args).backward()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def weigh(self, variant: Variant) -> Variant:
        """Measure the bytes of a variant."""
        for _ in range(WARM_UPS):
            self.step(variant)
        variant.saved_bytes = self._saved(variant)
        variant.module.zero_grad(set_to_none=True)
        measure = _peak_on_cpu if self.device.type == "cpu" else _peak_on_gpu
        variant.peak_bytes = measure(lambda: self.step(variant))
        variant.module.zero_grad(set_to_none=True)
        return variant

    def time(self, variants: Sequence[Variant], rounds: int, until: float) -> None:
        """Time all in turn, each round beginning with another, until `until` or `rounds`."""
        for i in range(rounds):
            if i >= 3 and time.monotonic() > until:
                return
            start = i % len(variants)
            for variant in [*variants[start:], *variants[:start]]:
                variant.seconds.append(self.step(variant))

    def _saved(self, variant: Variant) -> int:
        there = [*variant.module.parameters(), *self.args]
        known = {tensor.untyped_storage().data_ptr() for tensor in there}
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = variant.loss(*self.args)
        del out
        return sum(held.values())


_numbers = count()


def _own_code(module: nn.Module) -> Loss:
    """`module` as a function with its own code object, for which Dynamo caches nothing else."""

    def loss(*args: Tensor) -> Tensor:
        return module(*args)

    code = loss.__code__.replace(co_name=f"loss_{next(_numbers)}")
    return types.FunctionType(code, globals(), code.co_name, None, loss.__closure__)


def _peak_on_gpu(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(step: Callable[[], object]) -> int:
    """The allocator tells the profiler of each block; the running total is in the trace."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    blocks = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    totals = [block["args"]["Total Allocated"] for block in blocks]
    return max(totals) - (totals[0] - blocks[0]["args"]["Bytes"])


@contextlib.contextmanager
def cold_caches() -> Iterator[None]:
    """Within, inductor has nothing compiled before, in this process or on disk."""
    utils = torch._inductor.utils
    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    with fresh():
        yield


@contextlib.contextmanager
def whole_graphs_uncached(folder: str) -> Iterator[None]:
    """Within, kernels are cached in `folder` but graphs are not: each variant is cut anew."""
    graphs = (
        (torch._functorch.config, "enable_autograd_cache"),
        (torch._inductor.config, "fx_graph_cache"),
    )
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        with contextlib.ExitStack() as stack:
            for config, name in graphs:
                if hasattr(config, name):
                    stack.enter_context(config.patch({name: False}))
            yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@contextlib.contextmanager
def activation_budget(fraction: float) -> Iterator[None]:
    """Within, PyTorch's partitioner has this `activation_memory_budget`."""
    with torch._functorch.config.patch(activation_memory_budget=fraction):
        yield


def checkpointed(module: nn.Module, lists: Iterable[str]) -> nn.Module:
    """`module`, of which each block in `lists` runs under `torch.utils.checkpoint`."""
    for name in lists:
        for block in module.get_submodule(name):  # type: ignore[attr-defined]
            block.forward = _checkpointed(block.forward)
    return module


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)

    return run
