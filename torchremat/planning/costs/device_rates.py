"""Rates of devices: operations, bytes and launches a second, by data sheet or measured."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType

import torch

from torchremat.errors import ArgumentValueError, nearest_names

__all__ = ["Rates", "rates_of"]


def __dir__() -> list[str]:
    return sorted(__all__)


_logger = logging.getLogger("torchremat")

COMPUTE_FRACTION = 0.7
"""Of the matrix rates in a data sheet, what large multiplications reach."""

MEMORY_FRACTION = 0.85
"""Of the bandwidth in a data sheet, what a copy reaches."""


@dataclass(frozen=True)
class Rates:
    """Rates of a device: operations, bytes and launches in a second.

    Attributes:
        name: of the device.
        matmul_f64: floating-point operations per second of dense matrix multiplication in float64.
        matmul_f32: in float32; on a GPU by its vector units.
        matmul_tf32: in float32 rounded to TF32, if PyTorch uses that; else as `matmul_f32`.
        matmul_f16: in float16 and bfloat16.
        matmul_f8: in eight-bit floating point; as `matmul_f16` where it is not in hardware.
        matmul_int8: in int8.
        pointwise: simple operations (an addition) per second, on elements in a cache.
        bytes_per_second: of memory, read and written together.
        launch_seconds: from the start of one operator on next to nothing to that of the next.
        host_bytes_per_second: between host and device, one way; `None` without such a link.
        runs_ahead: whether operators are launched while others still run, as on a GPU.
        compute_fraction: what of the matrix rates can be reached: 1 for measured ones.
        memory_fraction: what of the bytes per second can be reached.

    Raises:
        ValueError: for rates that are not positive and finite.

    >>> KNOWN_DEVICES["h100"].name, KNOWN_DEVICES["h100"].bytes_per_second
    ('NVIDIA H100 SXM', 3350000000000.0)
    """

    name: str
    matmul_f64: float
    matmul_f32: float
    matmul_tf32: float
    matmul_f16: float
    matmul_f8: float
    matmul_int8: float
    pointwise: float
    bytes_per_second: float
    launch_seconds: float
    host_bytes_per_second: float | None = None
    runs_ahead: bool = True
    compute_fraction: float = COMPUTE_FRACTION
    memory_fraction: float = MEMORY_FRACTION

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "runs_ahead"):
                continue
            if field.name == "host_bytes_per_second" and value is None:
                continue
            most = 1.0 if field.name.endswith("_fraction") else math.inf
            if not _is_rate(value) or value > most:
                raise ArgumentValueError(
                    f"the rates of {self.name!r} have {field.name}={value!r}: each rate is a "
                    "positive finite number, and a fraction at most 1"
                )

    def matmul_rate(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Operations per second of matrix multiplication in `dtype` that can be reached.

        >>> h100 = KNOWN_DEVICES["h100"]
        >>> h100.matmul_rate(torch.bfloat16) > h100.matmul_rate(torch.float32, tf32=True)
        True
        """
        rate = getattr(self, _KINDS.get(dtype, "matmul_f32"))
        if tf32 and rate == self.matmul_f32 and dtype in (torch.float32, torch.complex64):
            rate = self.matmul_tf32
        return float(rate) * self.compute_fraction

    def memory_rate(self) -> float:
        """Bytes per second that can be reached."""
        return self.bytes_per_second * self.memory_fraction


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


_KINDS = {
    torch.float64: "matmul_f64",
    torch.complex128: "matmul_f64",
    torch.float16: "matmul_f16",
    torch.bfloat16: "matmul_f16",
    torch.float8_e4m3fn: "matmul_f8",
    torch.float8_e5m2: "matmul_f8",
    torch.int8: "matmul_int8",
    torch.uint8: "matmul_int8",
}


# Rates as data sheets give them: of dense matrices (half of those "with sparsity"), f64 of matrix
# units where there are such, and of the link to the host one way (PCIe 3, 4 and 5 with 16 lanes:
# 16, 32 and 64 GB/s). A dash: as the column before; in the last column: memory is the host's.
# Sources: NVIDIA's data sheets "B200", "GB200", "GH200", "H200", "H100", "A100", "A30", "A10",
# "A40", "RTX A6000", "L4", "L40", "L40S", "T4", "V100" and white papers "GA102", "Ada", "RTX
# Blackwell" (f16 and f8 summed in f32); AMD's "Instinct MI..." (PyTorch sees each half of an
# MI250X as a device); Apple's press releases (their GPUs have no f64: a thirtieth is made up).
_GPUS = """
short name     | name                    | T/s f64   f32   tf32  f16    f8   int8 vector | GB/s host
gb200          | NVIDIA GB200            |     40    80    1250  2500   5000 5000 80     | 8000 450
b200           | NVIDIA B200             |     37    75    1100  2250   4500 4500 75     | 7700 64
gh200          | NVIDIA GH200            |     67    67    494   989    1979 1979 67     | 4000 450
h200           | NVIDIA H200 SXM         |     67    67    494   989    1979 1979 67     | 4800 64
h200-nvl       | NVIDIA H200 NVL         |     60    60    418   836    1671 1671 60     | 4800 64
h100           | NVIDIA H100 SXM         |     67    67    494   989    1979 1979 67     | 3350 64
h100-pcie      | NVIDIA H100 PCIe        |     51    51    378   756    1513 1513 51     | 2000 64
h100-nvl       | NVIDIA H100 NVL         |     60    60    418   836    1671 1671 60     | 3900 64
a100           | NVIDIA A100 40GB        |     19.5  19.5  156   312    -    624  19.5   | 1555 32
a100-80gb      | NVIDIA A100 80GB SXM    |     19.5  19.5  156   312    -    624  19.5   | 2039 32
a100-80gb-pcie | NVIDIA A100 80GB PCIe   |     19.5  19.5  156   312    -    624  19.5   | 1935 32
a30            | NVIDIA A30              |     10.3  10.3  82    165    -    330  10.3   | 933  32
a10            | NVIDIA A10              |     0.98  31.2  62.5  125    -    250  31.2   | 600  32
a10g           | NVIDIA A10G             |     0.55  35    35    70     -    140  35     | 600  32
a40            | NVIDIA A40              |     0.58  37.4  74.8  149.7  -    299  37.4   | 696  32
a6000          | NVIDIA RTX A6000        |     0.6   38.7  77.4  154.8  -    310  38.7   | 768  32
l4             | NVIDIA L4               |     0.47  30.3  60    121    242  242  30.3   | 300  32
l40            | NVIDIA L40              |     1.41  90.5  90.5  181    362  362  90.5   | 864  32
l40s           | NVIDIA L40S             |     1.43  91.6  183   362    733  733  91.6   | 864  32
t4             | NVIDIA T4               |     0.25  8.1   -     65     -    130  8.1    | 320  16
v100           | NVIDIA V100 SXM2        |     7.8   15.7  -     125    -    62.8 15.7   | 900  16
v100-pcie      | NVIDIA V100 PCIe        |     7     14    -     112    -    56   14     | 900  16
3090           | NVIDIA GeForce RTX 3090 |     0.56  35.6  35.6  71     -    284  35.6   | 936  32
4090           | NVIDIA GeForce RTX 4090 |     1.29  82.6  82.6  165.2  330  661  82.6   | 1008 32
5090           | NVIDIA GeForce RTX 5090 |     1.64  104.8 104.8 209.5  419  838  104.8  | 1792 64
mi210          | AMD Instinct MI210      |     45.3  45.3  -     181    -    181  22.6   | 1638 32
mi250x         | half an MI250X of AMD   |     47.9  47.9  -     191.5  -    191  23.9   | 1638 32
mi300x         | AMD Instinct MI300X     |     163.4 163.4 653.7 1307.4 2614 2614 163.4  | 5300 64
mi325x         | AMD Instinct MI325X     |     163.4 163.4 653.7 1307.4 2614 2614 163.4  | 6000 64
mi350x         | AMD Instinct MI350X     |     72.1  144.2 -     2306.9 4614 4614 144.2  | 8000 64
mi355x         | AMD Instinct MI355X     |     78.6  157.3 -     2516.6 5033 5033 157.3  | 8000 64
m1             | Apple M1                |     0.09  2.6   -     -      -    -    2.6    | 68   -
m1-pro         | Apple M1 Pro            |     0.17  5.2   -     -      -    -    5.2    | 200  -
m1-max         | Apple M1 Max            |     0.35  10.4  -     -      -    -    10.4   | 400  -
m2             | Apple M2                |     0.12  3.6   -     -      -    -    3.6    | 100  -
generic-gpu    | a GPU like an A100      |     10    20    150   300    -    600  20     | 1500 32
"""


def _gpu(row: str) -> tuple[str, Rates]:
    short_name, name, operations, gigabytes = (cell.strip() for cell in row.split("|"))
    tera: list[float] = []
    for figure in operations.split():
        tera.append(tera[-1] if figure == "-" else float(figure))
    f64, f32, tf32, f16, f8, int8, vector = (1e12 * figure for figure in tera)
    memory, host = gigabytes.split()
    return short_name, Rates(
        name,
        matmul_f64=f64,
        matmul_f32=f32,
        matmul_tf32=tf32,
        matmul_f16=f16,
        matmul_f8=f8,
        matmul_int8=int8,
        pointwise=vector,
        bytes_per_second=1e9 * float(memory),
        launch_seconds=5e-6,  # of an operator of eager PyTorch, which a fast CPU launches
        host_bytes_per_second=None if host == "-" else 1e9 * float(host),
    )


_CPU = Rates(
    "a CPU of eight cores",
    matmul_f64=2.5e11,
    matmul_f32=5e11,
    matmul_tf32=5e11,
    matmul_f16=5e11,
    matmul_f8=5e11,
    matmul_int8=5e11,
    pointwise=8e10,
    bytes_per_second=8e10,
    launch_seconds=1e-6,
    runs_ahead=False,
)

KNOWN_DEVICES: Mapping[str, Rates] = MappingProxyType(
    dict(map(_gpu, _GPUS.strip().splitlines()[1:])) | {"cpu": _CPU}
)
"""Devices by short name; `generic-gpu` and `cpu` stand for those that are not here."""


# What compilers call the architectures: NVIDIA's compute capability, and AMD's names.
_DEVICES_BY_ARCH = {
    "sm_70": "v100 v100-pcie",
    "sm_75": "t4",
    "sm_80": "a100 a100-80gb a100-80gb-pcie a30 generic-gpu",
    "sm_86": "a10 a10g a40 a6000 3090",
    "sm_89": "l4 l40 l40s 4090",
    "sm_90": "gh200 h200 h200-nvl h100 h100-pcie h100-nvl",
    "sm_100": "gb200 b200",
    "sm_120": "5090",
    "gfx90a": "mi210 mi250x",
    "gfx942": "mi300x mi325x",
    "gfx950": "mi350x mi355x",
}
_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {name: arch for arch, names in _DEVICES_BY_ARCH.items() for name in names.split()}
)


def arch_of(rates: Rates) -> str | None:
    """The architecture of a GPU, as compilers name it; `None` for a CPU and an unknown device.

    >>> arch_of(rates_of("h100")), arch_of(rates_of("mi300x")), arch_of(rates_of("cpu"))
    ('sm_90', 'gfx942', None)
    """
    known = next((name for name, other in KNOWN_DEVICES.items() if other == rates), None)
    return _ARCHITECTURES.get(known or _name_of_known(rates.name) or "")


_STANDING_IN = ("generic-gpu", "cpu")


def stands_for_others(rates: Rates) -> bool:
    """Whether `rates` are not of a device, but of many whose own are unknown.

    >>> stands_for_others(KNOWN_DEVICES["cpu"]), stands_for_others(KNOWN_DEVICES["h100"])
    (True, False)
    """
    return any(rates is KNOWN_DEVICES[name] for name in _STANDING_IN)


def rates_of(device: "str | torch.device | None") -> Rates:
    """The rates of a device of `KNOWN_DEVICES`.

    Args:
        device: a short name (`"h100"`), what `torch.cuda.get_device_name` says (`"NVIDIA H100 80GB
            HBM3"`), or a device of this machine (`"cuda:0"`, `"cpu"`). `None`, or the device
            `meta`, which is nowhere, means this machine's accelerator, else the CPU.

    A GPU that is not in the table gets the figures of `generic-gpu`, and the logger `torchremat`
    says so.

    Raises:
        ValueError: for a name that is not a device's.
        RuntimeError: for a device that this machine does not have.

    >>> rates_of("NVIDIA A100-SXM4-80GB").name
    'NVIDIA A100 80GB SXM'
    >>> rates_of("h1000")
    Traceback (most recent call last):
    torchremat.errors.ArgumentValueError: 'h1000' is not a known device; nearest: 'h100', ...
    """
    if isinstance(device, str):
        found = _find_known(device)
        if found is not None:
            return found
        if _VENDOR.match(device):
            return _generic_gpu(device)
    device = this_device(device)
    if device.type == "cpu":
        return KNOWN_DEVICES["cpu"]
    name = accelerator_name(device)
    return _find_known(name) or _generic_gpu(name)


_VENDOR = re.compile(r"(nvidia|tesla|quadro|geforce|amd|radeon|intel|apple)\b", re.IGNORECASE)


@cache
def _generic_gpu(name: str) -> Rates:
    _logger.warning(
        "torchremat knows no rates of the device %r, and takes those of %s for it: "
        "torchremat.planning.cost_model.measure(device) measures its own",
        name,
        KNOWN_DEVICES["generic-gpu"].name,
    )
    return KNOWN_DEVICES["generic-gpu"]


def _find_known(name: str) -> Rates | None:
    """The entry of `KNOWN_DEVICES` that says the most words of `name` and no others."""
    short_name = _name_of_known(name)
    return None if short_name is None else KNOWN_DEVICES[short_name]


def _name_of_known(name: str) -> str | None:
    words = _words(name)
    short_names = [short for short in KNOWN_DEVICES if _words(short) <= words]
    return max(short_names, key=lambda short: len(_words(short)), default=None)


def _words(name: str) -> frozenset[str]:
    """The words of a name: `NVIDIA GeForce RTX4090` has nvidia, geforce, 4090."""
    spaced = re.sub(r"rtx(?=\d)", "rtx ", name.lower())
    words = re.split(r"[^a-z0-9]+", spaced)
    return frozenset(words) - {"", "rtx"}


def this_device(device: "str | torch.device | None") -> torch.device:
    """A device of this machine; `None` and `meta` mean its accelerator, else the CPU.

    >>> this_device("cpu")
    device(type='cpu')
    """
    if isinstance(device, str):
        device = _parse_device(device)
    here = _accelerator()
    if device is None or device.type == "meta":
        return here or torch.device("cpu")
    if not is_here(device):
        has = (
            f"{torch.accelerator.device_count()} of type {here.type!r}"
            if here
            else "none but the CPU"
        )
        raise RuntimeError(
            f"the device {str(device)!r} is not in this machine, which has {has}. To plan for one "
            "that is elsewhere, name it: 'h100', 'NVIDIA H100 PCIe', or with Rates of its own"
        )
    return device


def is_here(device: torch.device) -> bool:
    """Whether this machine has `device`, which fake tensors may be on though it has not."""
    here = _accelerator()
    if device.type == "cpu":
        return True
    is_alike = here is not None and here.type == device.type
    return is_alike and (device.index or 0) < torch.accelerator.device_count()


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _parse_device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise ArgumentValueError(
            f"{name!r} is not a known device; {nearest_names(name, KNOWN_DEVICES)}. A device is a "
            "short name of torchremat.planning.costs.device_rates.KNOWN_DEVICES, the name of a "
            "GPU as PyTorch gives it, or 'cpu', 'cuda', 'cuda:1', ..."
        ) from None


def accelerator_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "xpu":
        return str(torch.xpu.get_device_name(device))
    return "Apple" if device.type == "mps" else device.type
