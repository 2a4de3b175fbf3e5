"""Surroundings: autocast, grad modes, hooks, what is frozen; as in plain PyTorch, call after call.

A case is a step that is taken several times with and without checkpoint, in changing surroundings:
a trace that went stale would show.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchremat as tr
from tests.helpers import assert_same

POLICIES = [None, "dots", "none"]
WAYS: dict[str, Callable[..., Any]] = {
    "checkpoint": lambda net, policy=None: tr.checkpoint(net, policy=policy),
    "wrap": lambda net, policy=None: tr.nn.wrap(net, policy),
}
Step = Callable[[Callable[..., Any], Any, int], Any]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.GELU()), nn.Linear(3, 3)
    )


def net_of(forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    """Makes a module with a linear layer `lin` and this forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            return forward(self.lin, x)

    return Net


def train(fun: Callable[..., Any], net: Any, number: int, around: Any = nullcontext) -> Any:
    """Forward pass (`around` it that context) and backward pass."""
    x = torch.randn(4, 3, requires_grad=True)
    with around():
        out = fun(x)
    out.float().square().sum().backward()
    return out.detach(), x.grad


def runs(make: Callable[[], Any], prepare: Any, step: Step, times: int) -> list[Any]:
    torch.manual_seed(0)
    net = make()
    fun = prepare(net)
    found = []
    for number in range(times):
        torch.manual_seed(number)
        net.zero_grad()
        result = step(fun, net, number)
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}
        buffers = {n: b.clone() for n, b in net.named_buffers()}
        found.append((result, grads, buffers, torch.get_rng_state()))
    return found


def check(
    make: Callable[[], Any], step: Step, way: str, policy: Any = None, times: int = 4
) -> None:
    """Each step gives the same with and without checkpoint."""
    expected = runs(make, lambda net: net, step, times)
    found = runs(make, lambda net: WAYS[way](net, policy), step, times)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert_same(a, b, f"{way} {policy}, step {number}")


def steps(*each: Step) -> Step:
    return lambda fun, net, number: each[number % len(each)](fun, net, number)


# --- autocast ------------------------------------------------------------------------------------


def amp(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return torch.autocast("cpu", dtype=dtype, **options)


def under(around: Any) -> Step:
    return lambda fun, net, number: train(fun, net, number, around)


HALF = under(lambda: amp(torch.float16))
OFF = under(lambda: torch.autocast("cpu", enabled=False))
AUTOCAST = {
    "always": under(amp),
    "now and then": steps(under(amp), train, HALF, OFF),
    "without its cache": steps(under(lambda: amp(cache_enabled=False)), under(amp)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_around(name, way, policy):
    check(mlp, AUTOCAST[name], way, policy)


def casts_inside(lin, x):
    with amp():
        y = lin(x)
    return lin(x) + y


def casts_not_inside(lin, x):
    with torch.autocast("cpu", enabled=False):
        y = lin(x.float())
    return lin(x) + y


def asks(lin, x):
    half = torch.get_autocast_dtype("cpu") == torch.float16
    return lin(x).float() * torch.is_autocast_enabled("cpu") + x * half


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forward", [casts_inside, casts_not_inside, asks])
def test_autocast_inside(forward, way):
    # not bfloat16 inside float16: plain PyTorch's cache then hands out casts of the wrong dtype
    each = steps(under(amp), train, OFF) if forward is casts_inside else AUTOCAST["now and then"]
    check(net_of(forward), each, way)


def casts_without_grad_first(lin, x):
    with torch.no_grad():
        y = lin(x)
    return lin(x) * y


def casts_in_two_blocks(lin, x):
    for _ in range(2):
        with amp():
            x = lin(lin(x))
    return x


READS_TWICE = {
    "in a row": lambda lin, x: lin(lin(x).sin()),
    "first without grad": casts_without_grad_first,
    "under vmap": lambda lin, x: torch.vmap(lambda row: lin(lin(row)))(x),
    "in two blocks": casts_in_two_blocks,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("name", READS_TWICE)
def test_autocast_casts_a_weight_once_for_all_who_read_it(name, caches, policy):
    """Their gradients are then added in bfloat16; without its cache in float32."""
    each = steps(under(lambda: amp(cache_enabled=caches)), train)
    check(net_of(READS_TWICE[name]), each, "wrap", policy)


@contextmanager
def amp_in_training() -> Iterator[None]:
    with amp(cache_enabled=False):
        yield


@pytest.mark.parametrize("policy", POLICIES)
def test_regions_that_share_a_weight_under_autocast(policy):
    """The cast of a weight belongs to the region (pytorch#193338).

    Plain PyTorch with autocast's cache adds the gradients of the two in bfloat16; without it, and
    here, in float32.
    """

    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.a(torch.relu(self.a(x))) + self.b(x) + self.c(x)

    def wrapped(net: Any) -> Any:
        for layer in (net.a, net.b):
            tr.nn.wrap(layer, policy)
        return net

    def step(fun: Any, net: Any, number: int) -> Any:
        result = train(fun, net, number, amp_in_training)
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(0.1 * p.grad)
        return result

    assert_same(runs(Siblings, lambda net: net, step, 3), runs(Siblings, wrapped, step, 3))

    def cached(fun: Any, net: Any, number: int) -> Any:
        return train(fun, net, number, amp)

    assert_same(
        runs(Siblings, wrapped, cached, 3), runs(Siblings, wrapped, under(amp_in_training), 3)
    )


def test_a_weight_updated_within_one_autocast_block():
    """Plain PyTorch goes on with the cached cast of the old weight; a checkpoint has no cache."""
    lin = nn.Linear(3, 3)
    fun = tr.checkpoint(lin)
    x = torch.ones(2, 3)
    with amp():
        fun(x)
        with torch.no_grad():
            lin.weight.zero_()
        assert_same(fun(x).detach(), lin.bias.detach().bfloat16().expand(2, 3).contiguous())


# --- grad modes ----------------------------------------------------------------------------------


def evaluate(around: Any) -> Step:
    """A forward pass, and a backward pass if there is anything to go back from."""

    def step(fun: Any, net: Any, number: int) -> Any:
        x = torch.randn(4, 3, requires_grad=True)
        with around():
            out = fun(x)
        if out.requires_grad:
            out.square().sum().backward()
        return out.detach().clone(), out.requires_grad, out.is_inference(), x.grad

    return step


EACH_MODE = steps(
    *(evaluate(m) for m in (nullcontext, torch.no_grad, torch.inference_mode, torch.enable_grad))
)
IN_TURN = steps(
    *(evaluate(m) for m in (torch.inference_mode, torch.no_grad, nullcontext, torch.inference_mode))
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("each", [EACH_MODE, IN_TURN], ids=["grad first", "inference first"])
def test_modes_around(each, way, policy):
    check(mlp, each, way, policy)


def no_grad_part(lin, x):
    with torch.no_grad():
        y = lin(x)
    return lin(x) * y


def set_grad_enabled_part(lin, x):
    with torch.set_grad_enabled(False):
        y = lin(x)
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return lin(x) * y


@torch.no_grad()
def target(lin, x):
    return lin(x)


def decorated_part(lin, x):
    return (lin(x) - target(lin, x.flip(0))).exp()


def inference_part(lin, x):
    with torch.inference_mode():
        chosen = lin(x).argmax(-1)
    return lin(x)[torch.arange(4), chosen.clone()]


def inference_first(lin, x):
    with torch.inference_mode():
        y = lin(x).clone()
    return lin(x) + y


def forces(lin, x):
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(lin(z).square().sum(), z, create_graph=True)
    return (lin(x) + g).detach() + lin(x)


def enable_grad_part(lin, x):
    with torch.enable_grad():
        return lin(x).square()


def asks_grad_mode(lin, x):
    return lin(x) * (1 + torch.is_grad_enabled()) + torch.is_inference_mode_enabled()


MODES_INSIDE = [
    no_grad_part,
    set_grad_enabled_part,
    decorated_part,
    inference_part,
    inference_first,
    forces,
    enable_grad_part,
    asks_grad_mode,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forward", MODES_INSIDE)
def test_modes_inside(forward, way):
    # no gradients, those of `forces` neither, can be taken in inference mode
    each = steps(evaluate(nullcontext), evaluate(torch.no_grad)) if forward is forces else EACH_MODE
    check(net_of(forward), each, way, times=8)


# --- other switches ------------------------------------------------------------------------------


@contextmanager
def deterministic(value: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(value)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def asks_determinism(lin, x):
    return lin(x) * (1 + torch.are_deterministic_algorithms_enabled())


def attends(lin, x):
    q = lin(x)[None, None]
    return F.scaled_dot_product_attention(q, q, q)[0, 0]


@pytest.mark.parametrize(
    "name",
    [
        "deterministic",
        "attention",
        "default dtype",
        "default device",
    ],
)
def test_switches_between_calls(name):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    @contextmanager
    def doubles(value):
        torch.set_default_dtype(torch.double if value else torch.float)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float)

    kernels = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    forward, around = {
        "deterministic": (asks_determinism, deterministic),
        "attention": (attends, lambda value: sdpa_kernel(kernels[int(value)])),
        "default dtype": (lambda lin, x: lin(x) * torch.ones(3), doubles),
        "default device": (
            lambda lin, x: lin(x) * torch.ones(3, device="cpu"),
            lambda value: torch.device("meta") if value else nullcontext(),
        ),
    }[name]

    def step(fun: Any, net: Any, number: int) -> Any:
        x = torch.randn(4, 3, requires_grad=True)
        with around(number % 2 == 1):
            out = fun(x)
            out.square().sum().backward()
        return out.detach(), x.grad

    check(net_of(forward), step, "checkpoint")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_around():
    def step(fun: Any, net: Any, number: int) -> Any:
        with torch.autograd.detect_anomaly():
            return train(fun, net, number)

    check(mlp, step, "checkpoint")


# --- hooks ---------------------------------------------------------------------------------------

Register = Callable[[Any], Any]


def doubled_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


HOOKS: dict[str, Register] = {
    "forward": lambda m: m[1].register_forward_hook(lambda mod, args, out: out * 2),
    "forward with keywords": lambda m: m[1].register_forward_hook(
        lambda mod, args, kwargs, out: out * 2, with_kwargs=True
    ),
    "before forward": lambda m: m[1].register_forward_pre_hook(lambda mod, args: (args[0] * 2,)),
    "backward": lambda m: m[1].register_full_backward_hook(
        lambda mod, grads, outs: (grads[0] * 2,)
    ),
    "before backward": lambda m: m[1].register_full_backward_pre_hook(
        lambda mod, outs: (outs[0] * 3,)
    ),
    "on an output": lambda m: m[1].register_forward_hook(
        lambda mod, args, out: out.register_hook(lambda g: g * 2) and None
    ),
    "on a parameter": lambda m: m[1][0].weight.register_hook(lambda g: g * 2),
    "after accumulation": lambda m: m[1][0].weight.register_post_accumulate_grad_hook(
        doubled_gradient
    ),
    "forward of the root": lambda m: m.register_forward_hook(lambda mod, args, out: out * 2),
    "before forward of the root": lambda m: m.register_forward_pre_hook(
        lambda mod, args: (args[0] * 2,)
    ),
    "backward of the root": lambda m: m.register_full_backward_hook(
        lambda mod, grads, outs: (grads[0] * 2,)
    ),
    "forward of all": lambda m: nn.modules.module.register_module_forward_hook(
        lambda mod, args, out: out * 2 if isinstance(mod, nn.GELU) else None
    ),
    "before forward of all": lambda m: nn.modules.module.register_module_forward_pre_hook(
        lambda mod, args: (args[0] * 2,) if isinstance(mod, nn.GELU) else None
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.sampled(3)
def test_hooks_added_and_removed_between_calls(name, way):
    def step(fun: Any, net: Any, number: int) -> Any:
        handle = HOOKS[name](net) if number in (1, 2, 4) else None
        try:
            return train(fun, net, number)
        finally:
            if handle is not None:
                handle.remove()

    check(mlp, step, way, times=6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["forward", "before forward"])
def test_a_hook_that_stays(name, way):
    def step(fun: Any, net: Any, number: int) -> Any:
        if number == 1:
            HOOKS[name](net)
        return train(fun, net, number)

    check(mlp, step, way)


@pytest.mark.parametrize("name", ["forward", "before forward"])
def test_another_hook_each_time(name):
    def step(fun: Any, net: Any, number: int) -> Any:
        if name == "forward":
            handle = net[1].register_forward_hook(lambda mod, args, out: out * (number + 2))
        else:
            handle = net[1].register_forward_pre_hook(lambda mod, args: (args[0] * (number + 2),))
        with handle:
            return train(fun, net, number)

    check(mlp, step, "checkpoint")


SIDE_EFFECTS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "forward": lambda m, log: m.register_forward_hook(lambda mod, args, out: log.append(1)),
    "backward": lambda m, log: m.register_full_backward_hook(lambda mod, g, o: log.append(1)),
}


@pytest.mark.parametrize("name", SIDE_EFFECTS)
def test_hooks_of_a_wrapped_module_itself_run_once_a_step(name):
    counts = []
    for prepare in (lambda net: net, tr.nn.wrap):
        log: list[int] = []
        net = prepare(mlp())
        SIDE_EFFECTS[name](net, log)
        for number in range(3):
            train(net, net, number)
        counts.append(len(log))
    assert counts == [3, 3]


@pytest.mark.parametrize("name", SIDE_EFFECTS)
def test_hooks_on_modules_inside_run_once_a_step_or_it_is_said(name, caplog):
    log: list[int] = []
    net = mlp()
    SIDE_EFFECTS[name](net[1], log)
    fun = tr.checkpoint(net)
    for number in range(3):
        train(fun, net, number)
    assert len(log) == 3 or "forward hook" in caplog.text


@pytest.mark.parametrize("way", ["whole", "inside", "nested", "checkpoint"])
def test_backward_hooks_get_the_gradients_of_each_step(way):
    def run(way):
        log: list[float] = []
        torch.manual_seed(0)
        part = nn.Sequential(nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(0.3))
        net = nn.Sequential(nn.Linear(3, 4), part, nn.Linear(4, 2))
        part.register_full_backward_hook(
            lambda m, grads, outs: (log.append(outs[0].sum().item()), (grads[0] * 2,))[1]
        )
        part[1].register_full_backward_pre_hook(lambda m, outs: log.append(outs[0].max().item()))
        net[2].register_full_backward_hook(lambda m, grads, outs: log.append(grads[0].min().item()))
        if way in ("inside", "nested"):
            tr.nn.wrap(part)
        if way in ("whole", "nested"):
            tr.nn.wrap(net)
        fun = tr.checkpoint(net) if way == "checkpoint" else net
        found = []
        for number in range(3):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number)).requires_grad_()
            net.zero_grad()
            torch.manual_seed(number)
            fun(x).square().sum().backward()
            found.append([x.grad, *(p.grad for p in net.parameters())])
        return log, found

    assert_same(run("plain"), run(way))


@pytest.mark.parametrize("policy", ["full", "none", "budget:99%"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_backward_hook_sees_the_outputs_where_no_input_needs_a_gradient(policy, in_place):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(7, 4), nn.Linear(4, 3)

        def forward(self, tokens):
            x = self.linear(self.embedding(tokens))
            return x.mul_(2) if in_place else x * 2

    def gradients(wraps):
        torch.manual_seed(0)
        net, log = Net(), []
        net.embedding.register_full_backward_hook(lambda m, grads, outs: log.append((grads, outs)))
        if wraps:
            tr.nn.wrap(net, policy)
        for seed in range(3):
            torch.manual_seed(seed)
            tokens = torch.randint(7, (2, 5))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch tells that no input needs a gradient
                net(tokens).sin().sum().backward()
        return [*log, [p.grad for p in net.parameters()]]

    found, expected = gradients(True), gradients(False)
    assert len(found) == len(expected) == 4
    assert all(grads == (None,) for grads, _ in found[:3])
    assert all(torch.equal(a[1][0], b[1][0]) for a, b in zip(found[:3], expected[:3], strict=True))
    assert all(map(torch.equal, found[3], expected[3]))


def test_a_backward_hook_may_not_return_a_gradient_that_no_input_needs():
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    net[0].register_full_backward_hook(lambda m, grads, outs: (outs[0],))
    tr.nn.wrap(net, "full")
    with pytest.warns(UserWarning, match="no inputs require"):
        out = net(torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="returned a gradient of an input, and none needs one"):
        out.sum().backward()


def test_a_backward_hook_that_gives_too_many_gradients():
    net = mlp()
    net[1].register_full_backward_hook(lambda m, grads, outs: (grads[0], grads[0]))
    with pytest.raises(RuntimeError, match=r"returned 2 gradients and was given 1"):
        tr.checkpoint(net)(torch.ones(4, 3, requires_grad=True)).sum().backward()


# --- what the code of a module reads -------------------------------------------------------------

SCALE = 1.0
TABLE = [1.0]


class Reader(nn.Module):
    """A layer whose forward reads something besides its tensors and its plain attributes."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.config = Config()


class Config:
    scale = 1.0


class ReadsGlobal(Reader):
    def forward(self, x):
        return self.lin(x) * SCALE


class ReadsList(Reader):
    def forward(self, x):
        return self.lin(x) * TABLE[0]


class ReadsConfig(Reader):
    def forward(self, x):
        return self.lin(x) * self.config.scale


class ReadsClass(Reader):
    def forward(self, x):
        return self.lin(x) * self.scale


@pytest.mark.parametrize("inner", [False, True], ids=["itself", "inside another"])
@pytest.mark.parametrize("kind", [ReadsGlobal, ReadsList, ReadsConfig, ReadsClass])
def test_what_a_forward_reads_may_change(kind, inner, monkeypatch):
    def step(fun: Any, net: Any, number: int) -> Any:
        value = number + 1.0
        monkeypatch.setattr(sys.modules[__name__], "SCALE", value)
        TABLE[0] = value
        monkeypatch.setattr(kind, "scale", value)
        for module in net.modules():
            if isinstance(module, Reader):
                module.config.scale = value
        return train(fun, net, number)

    check((lambda: nn.Sequential(kind())) if inner else kind, step, "checkpoint")


# --- toggled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_train_and_eval_toggled(way, policy):
    def make() -> nn.Module:
        middle = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
        return nn.Sequential(nn.Linear(3, 3), middle, nn.Linear(3, 3))

    def step(fun: Any, net: Any, number: int) -> Any:
        net.train(number % 2 == 0)
        net[1][0].train(number != 2)
        return train(fun, net, number)

    check(make, step, way, policy, times=5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_requires_grad_toggled(way, policy):
    def step(fun: Any, net: Any, number: int) -> Any:
        net.requires_grad_(number not in (1, 4))
        net[1].requires_grad_(number != 2)
        x = torch.randn(4, 3, requires_grad=number % 2 == 0)
        out = fun(x)
        if out.requires_grad:
            out.square().sum().backward()
        return out.detach(), out.requires_grad, x.grad

    check(mlp, step, way, policy, times=6)


# --- frozen --------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.drop(x)))


def adapted() -> nn.Module:
    return nn.Sequential(Adapted(), nn.GELU(), Adapted())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", ["none", "frozen in turn", "merged"])
def test_adapters_on_a_frozen_base(change, way, policy):
    """No input has a gradient (transformers#42489): what trains are captured parameters alone."""

    def step(fun: Any, net: Any, number: int) -> Any:
        for layer in (net[0], net[2]):
            if change == "frozen in turn":
                layer.down.requires_grad_(number != 1)
            if change == "merged" and number == 1:
                with torch.no_grad():
                    layer.base.weight.add_(layer.up.weight @ layer.down.weight)
        out = fun(torch.randn(4, 3))
        out.square().sum().backward()
        return out.detach()

    check(adapted, step, way, policy, times=3)


def kept(fun: Callable[..., Tensor], *args: Tensor) -> tuple[list[tuple[int, ...]], bool]:
    """The shapes of what a call keeps, and whether it can be differentiated."""
    shapes: list[tuple[int, ...]] = []
    pack = lambda t: shapes.append(tuple(t.shape)) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fun(*args)
    return shapes, out.requires_grad


@pytest.mark.parametrize("policy", POLICIES)
def test_a_frozen_region_holds_nothing(policy):
    net = mlp().requires_grad_(False)
    assert kept(tr.checkpoint(net, policy=policy), torch.ones(2, 3)) == ([], False)
    for around in (torch.no_grad, torch.inference_mode):
        with around():
            assert kept(tr.checkpoint(mlp(), policy=policy), torch.ones(2, 3)) == ([], False)


def test_a_frozen_beginning_holds_no_more_than_plain():
    net = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    assert kept(tr.checkpoint(net, policy="none"), torch.ones(2, 3)) == kept(net, torch.ones(2, 3))
    assert kept(tr.checkpoint(net, policy="dots"), torch.ones(2, 3))[0] == [(2, 5)]
