"""`torchremat env`: versions, processors and settings, and nothing that names a person or place."""

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from torchremat import config
from torchremat.cli.terminal.output import show, write_json
from torchremat.core.formatting import human_bytes, table

_PACKAGES = (
    "torchremat", "torch", "numpy", "scipy", "highspy", "triton", "rich", "click", "matplotlib",
    "transformers", "lightning",
)  # fmt: skip

# what changes what is computed or how fast; paths, addresses and keys are in none of them
_VARIABLES = (
    "TORCHREMAT_LOG_CHECKPOINT_RESIDUALS", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TRITON_INTERPRET", "NO_COLOR",
)  # fmt: skip


def run_env(json_path: str | None) -> None:
    """Show the packages, the machine and the settings, for a bug report."""
    found = environment()
    if json_path != "-":
        show("\n\n".join(_section(title, rows) for title, rows in found.items()))
    if json_path is not None:
        write_json(found, json_path)


def environment() -> dict[str, dict[str, str]]:
    """Packages, machine and settings, as text by name.

    >>> found = environment()
    >>> list(found), found["packages"]["torch"] == torch.__version__
    (['packages', 'machine', 'settings'], True)
    """
    return {"packages": _packages(), "machine": _machine(), "settings": _settings()}


def _packages() -> dict[str, str]:
    found = {"python": f"{platform.python_version()} ({platform.python_implementation()})"}
    return found | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    if package == "torch":
        return str(torch.__version__)  # with +cpu or +cu130
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _machine() -> dict[str, str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or "-",
        "processor": _processor(),
        "cores": f"{os.cpu_count()}, of which {usable} usable",
        "memory": _memory(),
        "cuda": f"{torch.version.cuda or '-'}, hip {torch.version.hip or '-'}",
    }
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        found[f"gpu {i}"] = (
            f"{gpu.name}, {human_bytes(gpu.total_memory)}, sm {gpu.major}.{gpu.minor}"
        )
    if torch.backends.mps.is_available():
        found["gpu"] = "Apple (mps)"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "-"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "-"


def _memory() -> str:
    try:
        return human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not POSIX
        return "-"


def _settings() -> dict[str, str]:
    found: dict[str, Any] = {
        "torch threads": torch.get_num_threads(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "config.log_checkpoint_residuals": config.log_checkpoint_residuals,
        "config.verify_recomputation": config.verify_recomputation,
    }
    found |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {name: str(value) for name, value in found.items()}


def _section(title: str, rows: Mapping[str, str]) -> str:
    return "\n".join([f"{title}:", *table(list(rows.items()), numeric=())])
