"""Steps of models that are interrupted at random moments: a program, so that an abort is seen.

    python interrupted_steps.py NUMBER SEED

The number of interrupts is divided over ways to run a model. Half of them come after a random time,
the others at a random call of a Python function: timers rarely hit what takes no time.
"""

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from pkgutil import resolve_name

import torch
from torch import nn

import torchremat as tr
from torchremat import _torch
from torchremat._torch import patches
from torchremat.tracing.tracing import trace_lock

ROWS = 256


class Block(nn.Module):
    """A layer with a buffer, random numbers, a level of `torch.func` and a value that escapes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)
        self.last = None

    def forward(self, x):
        self.last = torch.tanh(self.up(self.norm(x)))
        return x + self.drop(self.down(torch.func.vmap(torch.sin)(self.last)))


WAYS = {
    "whole": lambda model: tr.nn.wrap(model),
    "layers": lambda model: tr.nn.wrap(model, "dots", select="first:2"),
    "budget": lambda model: tr.nn.wrap(model, "budget:80%"),
    "compiled": lambda model: tr.nn.wrap(model, compile="aot_eager"),
}


def stop(_number, _frame):
    raise TimeoutError("the time is over")  # which those who catch any `Exception` must not keep


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1))


def step(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(torch.randn(ROWS, 8)).square().sum()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [loss.detach(), *gradients, *map(torch.clone, model.buffers())]


# --- interrupts ----------------------------------------------------------------------------------


def interrupt_after(seconds, model):
    """Run a step that is interrupted after this time; it may be over before."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        step(model)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# The library takes generated code for that of who called it, and so the signal for one from there.
_GENERATED = compile(
    """
def count(frame, event, argument):
    if event in ("call", "c_return"):
        calls[0] -= 1
        if not calls[0]:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGALRM)
""",
    "<string>",
    "exec",
)


def interrupt_at_call(number, model):
    """Run a step that is interrupted at the call of this number; return how many are left."""
    scope = {"calls": [number], "sys": sys, "os": os, "signal": signal}
    exec(_GENERATED, scope)
    sys.setprofile(scope["count"])
    try:
        step(model)
    finally:
        sys.setprofile(None)
    return scope["calls"][0]


# --- what must be as before ----------------------------------------------------------------------


def read_patches():
    found = {}
    for patch in patches.PATCHES:
        if patch.make is not None:
            owner = resolve_name(patch.owner)
            is_class = patch.name == "__class__"
            found[patch.owner, patch.name] = (
                type(owner) if is_class else vars(owner).get(patch.name)
            )
    return found


def read_state():
    module = torch.nn.modules.module
    hooks = ("forward", "forward_pre", "backward", "backward_pre")
    return {
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "levels of torch.func": _torch.transform_depth(),
        "included keys": str(torch._C._dispatch_tls_local_include_set()),
        "excluded keys": str(torch._C._dispatch_tls_local_exclude_set()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "forward mode": torch._C._is_fwd_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "threads of autograd": torch._C._is_multithreading_enabled(),
        "saved tensors hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "module hooks": [len(getattr(module, f"_global_{name}_hooks")) for name in hooks],
        "patches": read_patches(),
        "compilation": torch._guards.TracingContext.try_get(),
        "handler": signal.getsignal(signal.SIGALRM),
        "threads": {thread.name for thread in threading.enumerate()},
        "lock is free": is_lock_free(),
    }


def is_lock_free():
    def look():
        found.append(trace_lock.acquire(timeout=1))
        if found[0]:
            trace_lock.release()

    found = []
    other = threading.Thread(target=look, name="look")
    other.start()
    other.join()
    return found[0]


def find_fakes(value, path="model", depth=8):
    """Where fake tensors are that can be reached from `value`."""
    if _torch.is_fake(value):
        return [path]
    if isinstance(value, torch.Tensor) or not depth:
        return []
    if isinstance(value, nn.Module):
        value = vars(value)
    if isinstance(value, dict):
        pairs = value.items()
    else:
        pairs = enumerate(value) if isinstance(value, list | tuple | set) else ()
    return [f for k, v in list(pairs) for f in find_fakes(v, f"{path}.{k}", depth - 1)]


def check(model, expected, before):
    gc.collect()
    after = read_state()
    changed = {k: (before[k], after[k]) for k in before if before[k] != after[k]}
    assert not changed, changed
    assert not find_fakes(model), find_fakes(model)
    model.load_state_dict(new_model().state_dict())  # a step may have ended after it wrote buffers
    values = step(model)
    assert all(map(torch.equal, values, expected)), "values differ from those of plain PyTorch"


# --- the program ---------------------------------------------------------------------------------


def run(way, num_interrupts, random_numbers, expected):
    step(WAYS[way](new_model()))  # what is imported late is imported now
    start = time.perf_counter()
    step(WAYS[way](new_model()))
    seconds = time.perf_counter() - start
    num_calls = -interrupt_at_call(0, WAYS[way](new_model()))
    before = read_state()
    num_stopped = 0
    for i in range(num_interrupts):
        model = WAYS[way](new_model())
        if i % 2:
            interrupt, at = interrupt_at_call, random_numbers.randint(1, num_calls)
        else:
            interrupt, at = interrupt_after, random_numbers.uniform(0.0001, seconds)
        print(way, interrupt.__name__, at, flush=True)
        try:
            interrupt(at, model)
        except TimeoutError:
            num_stopped += 1
        check(model, expected, before)
    return num_stopped


def main():
    faulthandler.enable()
    num_interrupts, seed = map(int, sys.argv[1:])
    random_numbers = random.Random(seed)
    signal.signal(signal.SIGALRM, stop)
    expected = step(new_model())
    num_each = num_interrupts // len(WAYS)
    num_stopped = sum(run(way, num_each, random_numbers, expected) for way in WAYS)
    print(f"{num_stopped} steps were stopped")


if __name__ == "__main__":
    main()
