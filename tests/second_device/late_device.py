"""The device `late`: see `late/late.h`. It is made once for a process, for good."""

import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

_SOURCES = Path(__file__).parent / "late"


@cache
def make_late_device() -> Any:
    """Compile the device, which takes a minute the first time, and make it `torch.late`."""
    extension = cpp_extension.load(
        "torchremat_late",
        [str(path) for path in sorted(_SOURCES.glob("*.cpp"))],
        extra_cflags=["-O1", "-g0", "-fvisibility=hidden"],
    )
    torch.utils.rename_privateuse1_backend("late")

    def find_generator(device: Any) -> torch.Generator:
        index = device if isinstance(device, int) else torch.device(device).index
        now = extension.current_device() if index is None else index
        return extension.default_generator(now)

    def seed_all(seed: int) -> None:
        for index in range(extension.device_count):
            find_generator(index).manual_seed(seed)

    module = types.ModuleType("torch.late")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: extension.device_count,
        current_device=extension.current_device,
        set_device=extension.set_device,
        synchronize=torch.accelerator.synchronize,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        manual_seed=lambda seed: find_generator(extension.current_device()).manual_seed(seed),
        manual_seed_all=seed_all,
        get_rng_state=lambda device="late": find_generator(device).get_state(),
        set_rng_state=lambda state, device="late": find_generator(device).set_state(state),
        show_copies_first=extension.show_copies_first,
        set_limit=extension.set_limit,
        count_pending=extension.count_pending,
    )
    sys.modules["torch.late"] = module
    torch._register_device_module("late", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return module
