"""Rates of a device of this machine: measured, and cached on disk."""

import hashlib
import json
import logging
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.accelerators import (
    get_all_generator_states,
    has_streams,
    set_all_generator_states,
)
from torchremat.planning.costs.device_rates import Rates, accelerator_name, rates_of
from torchremat.tracing.ambient_state import without_autocast

_logger = logging.getLogger("torchremat")

clock: Callable[[], float] = time.perf_counter


def time_call(call: Callable[[], object], device: torch.device, *, patience: float = 0.03) -> float:
    """The seconds that `call` takes on `device`: the median of five rounds, or of fewer.

    Rounds of what is short have many calls. After `patience` seconds no new round is begun.

    >>> time_call(lambda: torch.ones(10).sum(), torch.device("cpu"), patience=0) > 0
    True
    """
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else _nothing
    call()  # the first call compiles, loads and allocates
    rounds: list[float] = []
    num_calls = 1
    begin = clock()
    while True:
        synchronize(device)
        start = clock()
        for _ in range(num_calls):
            call()
        synchronize(device)
        elapsed = clock() - start
        if elapsed < 2e-4 and num_calls < 1024:
            num_calls *= 4
            continue
        rounds.append(elapsed / num_calls)
        if len(rounds) == 5 or clock() - begin > patience:
            return statistics.median(rounds)


def _nothing(device: torch.device) -> None:
    pass


@contextmanager
def on_real_tensors(device: torch.device) -> Iterator[None]:
    """A block that runs operators, in a trace too, and leaves the random streams as they are."""
    with _torch.isolate(), without_autocast(), torch.no_grad():
        states = get_all_generator_states()
        try:
            yield
        finally:
            set_all_generator_states(states.items())


def cache_file(kind: str, device: torch.device, suffix: str) -> Path:
    label = f"{label_of(device)}, torch {torch.__version__}"
    words = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-")
    # two labels may have the same words
    digest = hashlib.sha256(label.encode()).hexdigest()[:8]
    return _cache_folder() / f"{kind}-{words}-{digest}{suffix}"


def _cache_folder() -> Path:
    folder = os.environ.get("TORCHREMAT_CACHE_DIR")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "torchremat"


def label_of(device: torch.device) -> str:
    """The device's name; of a CPU with the number of threads, on which its rates depend."""
    if device.type != "cpu":
        return accelerator_name(device)
    return f"{_cpu_name()}, threads {torch.get_num_threads()}"


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def load_rates(device: torch.device, *, again: bool = False) -> Rates:
    """The rates of `device` that are on disk, else (or if `again`) measured, and put there."""
    path = cache_file("rates", device, ".json")
    if not again:
        rates = _read(path)
        if rates is not None:
            return rates
    rates = measure_rates(device)
    _write(path, rates)
    return rates


VERSION_OF_RATES = 1
"""The version of the files. It changes with the meaning of a rate: others are measured again."""


def _read(path: Path) -> Rates | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["version"] != VERSION_OF_RATES:
            return None
        return Rates(**kept["rates"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.warning("%s has no rates that can be read (%s): measured again", path, error)
        return None


def _write(path: Path, rates: Rates) -> None:
    text = json.dumps({"version": VERSION_OF_RATES, "rates": asdict(rates)}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # another process may read, or write, at the same time
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        _logger.warning("rates cannot be kept in %s: %s", path, error)


def measure_rates(device: torch.device) -> Rates:
    known = rates_of(device)
    with on_real_tensors(device):
        single = _matmul_rate(device, torch.float32)
        assert single is not None
        # PyTorch has no flag for one product: other threads would see the setting of a measurement
        is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32" and device.type != "cpu"
        f32 = single * known.matmul_f32 / known.matmul_tf32 if is_tf32 else single
        f64 = _matmul_rate(device, torch.float64)  # Apple's GPUs have no float64
        halves = [_matmul_rate(device, dtype) for dtype in (torch.bfloat16, torch.float16)]
        f16 = max((rate for rate in halves if rate), default=f32)
        if device.type == "cpu":
            tf32 = f32
        elif is_tf32:
            tf32 = single
        else:  # by the matrix units that multiply halves
            tf32 = max(f32, f16 * known.matmul_tf32 / known.matmul_f16)
        return Rates(
            f"{label_of(device)}, measured",
            matmul_f64=f64 or f32 * known.matmul_f64 / known.matmul_f32,
            matmul_f32=f32,
            matmul_tf32=tf32,
            matmul_f16=f16,
            # products that few graphs have, and few kernels multiply: as the data sheet has them
            matmul_f8=f16 * known.matmul_f8 / known.matmul_f16,
            matmul_int8=f16 * known.matmul_int8 / known.matmul_f16,
            pointwise=_pointwise_rate(device) if device.type == "cpu" else f32,
            bytes_per_second=_memory_rate(device),
            launch_seconds=_launch_seconds(device),
            host_bytes_per_second=_host_rate(device) if has_streams(device) else None,
            runs_ahead=device.type != "cpu",
            compute_fraction=1.0,
            memory_fraction=1.0,
        )


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """The best rate of products of square matrices, of sizes up to where one takes 20 ms."""
    best = 0.0
    for n in (256, 512, 1024, 2048, 4096, 8192):
        try:
            a = torch.ones(n, n, device=device, dtype=dtype)
            seconds = time_call(lambda a=a: a @ a, device)  # type: ignore[misc]
        except (RuntimeError, TypeError):  # not for this dtype; or out of memory
            break
        best = max(best, 2 * n**3 / seconds)
        if seconds > 3e-3:  # the next takes eight times as long
            break
    return best or None


def _memory_rate(device: torch.device) -> float:
    """Bytes per second of a copy into used memory: new memory of a CPU is ten times as slow."""
    x = torch.ones((4 if device.type == "cpu" else 64) << 20, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / time_call(lambda: y.copy_(x), device, patience=0.1)


def _pointwise_rate(device: torch.device) -> float:
    """Additions per second, from `exp`, which takes as long as ten of them."""
    x = torch.ones(torch.get_num_threads() << 16, device=device)
    return 10 * x.numel() / time_call(x.exp, device)


def _launch_seconds(device: torch.device) -> float:
    x = torch.ones(1, device=device)
    return time_call(lambda: x + x, device)


def _host_rate(device: torch.device) -> float:
    """Bytes per second of the slower way between the device and memory that is pinned."""
    host = torch.ones(16 << 20).pin_memory()
    there = torch.ones(16 << 20, device=device)

    def seconds(target: Tensor, source: Tensor) -> float:
        return time_call(lambda: target.copy_(source, non_blocking=True), device, patience=0.1)

    return host.nbytes / max(seconds(there, host), seconds(host, there))
