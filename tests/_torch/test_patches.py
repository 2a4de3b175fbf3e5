"""Patches of PyTorch: other threads see none of them, and PyTorch is as it was afterwards.

Each thread is an executor of one worker that is waited for, so that the order of events is fixed.
"""

import threading
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pkgutil import resolve_name

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.module_tracker import ModuleTracker

import torchremat as tr
from tests.helpers import IS_2_11, skip_in_2_11
from torchremat import _torch
from torchremat._torch import patches

SESSION = object()
BY_NAME = {f"{p.owner}.{p.name}": p for p in patches.PATCHES}
CASES = {}


def case(name, block, around=nullcontext):
    """The decorated function looks at PyTorch: `block` changes what it returns, in one thread.

    A patch that this version of PyTorch does without has no case.
    """

    def register(look):
        if name in BY_NAME:
            CASES[name] = (block, look, around)
        return look

    return register


def trace():
    return patches.enter_trace(SESSION)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return 3 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return 3 * cotangent

    @staticmethod
    def vmap(info, in_dims, x):
        return Triple.apply(x), in_dims[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent


def take_first():
    return _torch.handle_function_calls(lambda cls, args, apply: args[0])


@case("torch.autograd.function:_SingleLevelFunction.apply", take_first)
@case("torch.autograd.function._bind_default_args", take_first)
@case("torch.autograd.function._call_custom_function_call", take_first)
def call_of_a_function():
    return Triple.apply(torch.ones(1)).item()


@case("torch.autograd.function:_SingleLevelFunction.setup_context", take_first)
def call_of_a_function_with_ctx():
    return Doubled.apply(torch.ones(1)).item()


LIFTED = torch.full((2, 3), 5.0)


def lift():
    return _torch.lift_before_wrapping(lambda x: LIFTED)


@case("torch._functorch.eager_transforms._wrap_for_grad", lift)
def gradient():
    return torch.func.grad(lambda x: (x * x).sum())(torch.ones(2, 3)).tolist()


@case("torch._functorch.vmap._add_batch_dim", lift)
def mapped():
    return torch.func.vmap(torch.sum)(torch.ones(2, 3)).tolist()


def count_calls(use_reentrant):
    def fun(x):
        calls.append(x)
        return x.sin()

    calls = []
    x = torch.ones(2, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(fun, x, use_reentrant=use_reentrant)
    y.sum().backward()
    return len(calls)


def call_functions():
    return _torch.handle_checkpoints(lambda fun, args, kwargs, _: fun(*args, **kwargs))


def after_a_checkpoint():
    count_calls(False)  # PyTorch itself sets the attribute at the first call
    return nullcontext()


@case(
    "torch.utils.checkpoint:checkpoint.__wrapped__.__dynamo_disable",
    call_functions,
    after_a_checkpoint,
)
def calls_of_a_checkpoint():
    return count_calls(False)


@case("torch.fx._symbolic_trace._is_fx_tracing_flag", trace)
def compilations():
    counter, fun = CompileCounter(), eval("lambda x: x.sin()")  # a new code object at each call
    torch.compile(fun, backend=counter, fullgraph=True)(torch.ones(2))
    return counter.frame_count


def test_what_is_compiled_runs_as_its_function_in_a_trace_of_this_thread(other):
    assert compilations() == 1
    with trace():
        assert compilations() == 0
        assert other.submit(compilations).result() == 1
        assert not torch.fx._symbolic_trace.is_fx_tracing()
    assert compilations() == 1


@case("torch.fx._symbolic_trace.__class__", trace)
def flag_as_an_attribute():
    """As torch/_higher_order_ops/utils.py reads and writes it."""
    module = torch.fx._symbolic_trace
    before = module._is_fx_tracing_flag
    module._is_fx_tracing_flag = False
    inside = module._is_fx_tracing_flag, bool(module.is_fx_symbolic_tracing())
    module._is_fx_tracing_flag = before
    return before, inside, bool(module.is_fx_symbolic_tracing()), bool(module.is_fx_tracing())


@case("torch._dynamo.config.error_on_nested_fx_trace", trace)
def setting_of_dynamo():
    return torch._dynamo.config.error_on_nested_fx_trace


@case("torch.nn.modules.module._has_any_global_hook", trace)
def warning_of_hooks():
    module = torch.nn.modules.module
    with module.register_module_forward_hook(lambda *_: None):
        return bool(module._has_any_global_hook())


@case(f"{proxy_tensor.__name__}.__class__", trace)
def current_tracer():
    from torch.fx.experimental.proxy_tensor import _CURRENT_MAKE_FX_TRACER

    return _CURRENT_MAKE_FX_TRACER


@case(f"{proxy_tensor.__name__}._set_make_fx_tracer", trace)
def tracer_inside():
    with proxy_tensor._set_make_fx_tracer("inner"):
        inside = proxy_tensor._CURRENT_MAKE_FX_TRACER
        plain = vars(proxy_tensor)["_CURRENT_MAKE_FX_TRACER"]
    return inside, plain, proxy_tensor._CURRENT_MAKE_FX_TRACER


TRACKER = ModuleTracker()
LINEAR = torch.nn.Linear(1, 1)


@case(
    "torch.nn.modules.module._global_forward_hooks, _global_forward_pre_hooks, ...",
    _torch.set_module_trackers_aside,
    lambda: TRACKER,
)
def tracked_modules():
    seen = []
    with LINEAR.register_forward_pre_hook(lambda *_: seen.extend(sorted(TRACKER.parents))):
        LINEAR(torch.ones(1))
    return seen


HOOKED = []


@case(
    "torch.nn.modules.module.register_module_forward_hook, register_module_forward_pre_hook",
    lambda: _torch.call_around_modules(lambda *_: HOOKED.append(1), lambda *_: HOOKED.append(2)),
)
def followed_modules():
    HOOKED.clear()
    LINEAR(torch.ones(1))
    return list(HOOKED)


READ = []


@case(
    "torch.nn.modules.module:Module.__getattribute__",
    lambda: _torch.note_attribute_reads(lambda _module, name: READ.append(name)),
)
def read_attributes():
    READ.clear()
    assert LINEAR.in_features == 1
    return list(READ)


@case(
    "torch._functorch.eager_transforms.JVP_NESTING",
    _torch.dual_level_as_functorch_level,
    forward_ad.dual_level,
)
def derivative_in_a_dual_level():
    try:
        return torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))[1].item()
    except RuntimeError as error:
        return str(error)


@case("torch._subclasses.__class__", lambda: _torch.hide_fakes([]))
def class_of_fakes():
    with _torch.new_fake_mode():
        return isinstance(torch.ones(1), torch._subclasses.FakeTensor)


@case("builtins.len", _torch.symbolic_lengths)
def length():
    shapes = _torch.new_shape_env()
    with _torch.new_fake_mode(shapes):
        return type(len(torch.empty(_torch.new_symbol(shapes, 6, "n"))))


@case(
    "torch.nn.attention.flex_attention._validate_device",
    lambda: _torch.stand_for_gpu(_torch.Gpu("sm_90")),
)
def gradients_of_flex_attention():
    check = resolve_name("torch.nn.attention.flex_attention._validate_device")
    try:
        return check(*(torch.ones(1, requires_grad=True) for _ in range(3)))
    except NotImplementedError:
        return "refused"


@case(
    "torch.amp.autocast_mode:autocast.__init__",
    lambda: _torch.stand_for_gpu(_torch.Gpu("sm_90")),
)
def device_of_autocast():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.autocast("cuda").device


@case("torch.library.Library", lambda: _torch.stand_for_gpu(_torch.Gpu("sm_90")))
def kernel_of_dropout():
    with _torch.new_fake_mode() as mode:
        x = mode.from_tensor(torch.ones(2, 2, requires_grad=True))
        return torch.dropout(x, 0.5, True).grad_fn.name()


# what is there for good, or for all threads, has a test of its own below
FOR_ALL = {
    "torch._functorch.autograd_function.vmapify_autograd_function",
    "torch.ops.aten.view.ZeroTensor",
    "torch.ops.*.FuncTorchBatched",
    "torch.use_deterministic_algorithms",
}


def test_every_patch_has_a_case():
    assert CASES.keys() | FOR_ALL == BY_NAME.keys()


def test_every_patch_says_what_it_is_for():
    for patch in patches.PATCHES:
        assert patch.why.endswith((".", "`"))
        assert patch.since >= "2.11"
        assert not patch.until or patch.until >= patch.since
        assert patch.threads.startswith("thread-local") or f"{patch.owner}.{patch.name}" in FOR_ALL


def state():
    """What stands in PyTorch where patches are made: the very objects."""
    found = {}
    for name in CASES.keys() - {SETTING}:
        patch = BY_NAME[name]
        if patch.make is not None:
            owner = resolve_name(patch.owner)
            is_class = patch.name == "__class__"
            found[name] = type(owner) if is_class else vars(owner).get(patch.name)
    hooks = [OrderedDict(place) for place in _torch.GLOBAL_MODULE_HOOKS]
    return found, hooks, IS_2_11 or torch._dynamo.config.error_on_nested_fx_trace


SETTING = "torch._dynamo.config.error_on_nested_fx_trace"


def skip_setting_of_all_threads(name):
    if name in (SETTING, "torch.fx._symbolic_trace._is_fx_tracing_flag"):
        skip_in_2_11(
            "settings of Dynamo are of all threads; traces hold a lock, and do not overlap"
        )


@pytest.fixture
def other():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("name", CASES)
def test_another_thread_sees_no_patch(name, other):
    skip_setting_of_all_threads(name)
    block, look, around = CASES[name]
    with around():
        before, plain = state(), look()
        with block():
            assert look() != plain
            assert other.submit(look).result() == plain
            assert look() != plain
        assert look() == plain
        assert state() == before


@pytest.mark.parametrize("name", CASES)
def test_a_patch_goes_with_an_exception(name):
    block, look, around = CASES[name]
    with around():
        before, plain = state(), look()
        with pytest.raises(ZeroDivisionError), block():
            raise ZeroDivisionError
        assert look() == plain
        assert state() == before


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_two_threads_overlap(name, other):
    """One enters, the other enters, the first leaves, the other leaves."""
    skip_setting_of_all_threads(name)
    block, look, around = CASES[name]
    with around():
        before, plain = state(), look()
        patched = other.submit(look_inside, block, look).result()
        assert patched != plain
        mine, theirs = ExitStack(), ExitStack()
        mine.enter_context(block())
        other.submit(theirs.enter_context, block()).result()
        assert (look(), other.submit(look).result()) == (patched, patched)
        mine.close()
        assert (look(), other.submit(look).result()) == (plain, patched)
        other.submit(theirs.close).result()
        assert (look(), other.submit(look).result()) == (plain, plain)
        if IS_2_11:
            torch._dynamo.config.error_on_nested_fx_trace = True
        assert state() == before


def look_inside(block, look):
    with block():
        return look()


# PyTorch's own, where Dynamo meets an autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_another_thread_compiles_in_the_meantime_is_what_it_would_be(other):
    def fun(x):
        y = torch.func.vmap(torch.func.grad(torch.sin))(x) + Doubled.apply(x)
        z = torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=False)
        return linear(z)

    def compile_and_run():
        counter = CompileCounter()
        result = torch.compile(fun, backend=counter, fullgraph=True)(torch.ones(2))
        module = torch.compile(torch.nn.Sequential(linear), backend=counter, fullgraph=True)
        return result.tolist(), module(torch.ones(2)).tolist(), counter.frame_count

    linear = torch.nn.Linear(2, 2)
    plain = compile_and_run()
    torch._dynamo.reset()
    found = []
    tr.make_graph(lambda x: found.append(other.submit(compile_and_run).result()) or x.sin())(
        torch.ones(2)
    )
    torch._dynamo.reset()
    assert found == [plain]


def test_hooks_of_a_user_are_still_warned_of_in_another_thread(other):
    has_hooks = torch.nn.modules.module._has_any_global_hook
    register = torch.nn.modules.module.register_module_forward_hook

    def look():
        with register(lambda *_: None):
            return bool(torch.nn.modules.module._has_any_global_hook())

    found = []

    def fun(x):
        found.append(other.submit(look).result())
        found.append(other.submit(torch.nn.modules.module._has_any_global_hook).result())
        return LINEAR(x)

    tr.make_graph(fun)(torch.ones(1))
    assert found == [True, False]
    assert torch.nn.modules.module._has_any_global_hook is has_hooks


def test_make_fx_of_another_thread_keeps_its_own_tracer(other):
    """It sets a global of the process; a trace of the library neither sees nor disturbs it."""

    def read(x):
        tracers.append(proxy_tensor._CURRENT_MAKE_FX_TRACER)
        return x.sin()

    def enter_here(x):
        with trace():
            tracers.append(proxy_tensor._CURRENT_MAKE_FX_TRACER)
            other.submit(read, x).result()
        return read(x)

    tracers = []
    with ThreadPoolExecutor(1) as third:
        third.submit(
            lambda: make_fx(lambda x: other.submit(enter_here, torch.ones(1)).result() * x)
        ).result()
    make_fx(lambda x: read(x))(torch.ones(1))
    assert tracers[0] is not None
    assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None


def test_functions_are_mapped_as_they_were_in_another_thread(other):
    def look():
        return torch.func.vmap(Triple.apply)(torch.ones(2)).tolist()

    plain = look()
    tr.vmap(lambda x: (Triple.apply(x), other.submit(look).result())[0], axis_name="i")(
        torch.ones(2)
    )
    assert other.submit(look).result() == plain


def test_views_of_zeros_are_what_they_were_in_another_thread(other):
    _torch.let_modes_see_views_of_zeros()
    zeros = other.submit(lambda: torch._efficientzerotensor((2, 3)).view(3, 2)).result()
    assert zeros._is_zerotensor()
    assert torch.equal(zeros, torch.zeros(3, 2))


def test_a_batching_rule_is_for_all_threads_until_it_goes(other):
    """Also while a thread calls PyTorch's own kernel instead."""

    def look():
        return torch.func.vmap(torch.sinc)(torch.zeros(2)).tolist()

    def rule(plain, x):
        if threading.current_thread() is threading.main_thread():
            found.append(other.submit(look).result())
            return plain(x)
        with _torch.at_level_below() as level:
            value, dim = _torch.unwrap_batched_tensor(x, level.number)
            return _torch.add_batch_dim(value + 5, dim, level.number)

    found = []
    library = _torch.replace_batching_rule(torch.ops.aten.sinc.default, rule)
    try:
        assert look() == [1.0, 1.0]
        assert found == [[5.0, 5.0]]
    finally:
        _torch.restore_batching_rule(library)
    assert other.submit(look).result() == [1.0, 1.0]


def test_one_thread_at_a_time_is_deterministic(other):
    entered = threading.Event()

    def enter():
        with patches.be_deterministic():
            entered.set()
            return torch.are_deterministic_algorithms_enabled()

    with pytest.raises(ZeroDivisionError), patches.be_deterministic():
        found = other.submit(enter)
        assert torch.are_deterministic_algorithms_enabled()
        assert not entered.is_set()
        raise ZeroDivisionError
    assert found.result()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.filterwarnings("ignore::torchremat.errors.OverrideWarning")
def test_a_reentrant_checkpoint_in_a_trace_only_calls_its_function(other):
    def fun(x):
        def inner(x):
            calls.append(1)
            return x.sin()

        found.append(other.submit(count_calls, True).result())
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=True).sum()

    calls, found = [], []
    x = torch.ones(2, requires_grad=True)
    tr.checkpoint(fun)(x).backward()
    assert (len(calls), found) == (1, [2])
    assert torch.equal(x.grad, torch.ones(2).cos())


def test_gradients_of_another_thread_are_checked_while_this_one_traces(other):
    """Anomaly mode is of the process, and a trace has no values for it to check."""

    def look():
        x = torch.zeros(1, requires_grad=True)
        try:
            (0 / x.sqrt()).sum().backward()
        except RuntimeError as error:
            return "nan" in str(error)

    def fun(x):
        found.append((torch.is_anomaly_enabled(), other.submit(look).result()))
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) * (x * x).exp()

    def gradient():
        x = torch.ones(2, requires_grad=True)
        return torch.autograd.grad(checkpointed(x).sum(), x)[0]

    found = []
    checkpointed = tr.checkpoint(fun)
    with torch.autograd.set_detect_anomaly(True):
        actual = gradient()
        in_graph = tr.make_graph(torch.func.grad(lambda x: (x.sin() * x.isnan()).sum()))
        text = str(in_graph(torch.ones(2)))
    assert found == [(True, True)]
    assert torch.equal(actual, gradient())
    assert text.count("isnan") == 1, "that of the user"


# --- training ------------------------------------------------------------------------------------

STEPS = 3


class Alone:
    """What two trainings do to meet: nothing."""

    def in_trace(self, step):
        pass

    def recompute(self, step, run):
        return run()


class Meeting(Alone):
    """Of two trainings each recomputes by PyTorch alone while the other is in a trace."""

    def __init__(self):
        self.traces = [threading.Event() for _ in range(STEPS)]
        self.recomputed = [threading.Event() for _ in range(STEPS)]
        self.other = None

    def in_trace(self, step):
        self.traces[step].set()
        assert self.other.recomputed[step].wait(60)

    def recompute(self, step, run):
        assert self.other.traces[step].wait(60)
        result = run()
        self.recomputed[step].set()
        return result


def train(seed, policy, meeting, traces_first):
    """Losses and parameters of a wrapped module, with a checkpoint that is traced at each step."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (4, 8 + seed, 4)
    layers = [torch.nn.Linear(*sizes[:2]), torch.nn.Tanh(), torch.nn.Linear(*sizes[1:])]
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    tr.nn.wrap(model, policy, select="*")

    def traced(step, x):
        def loss(y):
            traces.append(step)
            meeting.in_trace(step)
            z = torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=step % 2 == 0)
            return (z * z).sum()

        return tr.checkpoint(loss, policy=policy)(model(x))

    def recomputed(x):
        def fun(x):
            calls.append(1)
            return x.exp().sum()

        x = x.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(fun, x, use_reentrant=False).backward()
        return x.grad

    traces, calls, losses = [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.randn(3, 4, generator=generator)
        optimizer.zero_grad()
        parts = [
            lambda x=x, step=step: traced(step, x),
            lambda x=x, step=step: meeting.recompute(step, lambda: recomputed(x).sum()),
        ]
        value = sum(part() for part in (parts if traces_first else parts[::-1]))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert traces == list(range(STEPS))
    assert len(calls) == 2 * STEPS, "a checkpoint of PyTorch did not recompute"
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint in a function under a policy")
def test_two_trainings_at_once_give_the_bits_of_each_alone():
    runs = [(0, None, True), (1, tr.checkpoint_policies.dots_saveable, False)]
    alone = [train(seed, policy, Alone(), first) for seed, policy, first in runs]
    before = state()  # Dynamo adds an attribute to torch.utils.checkpoint at its first call
    one, other = Meeting(), Meeting()
    one.other, other.other = other, one
    with ThreadPoolExecutor(2) as both:
        started = [
            both.submit(train, seed, policy, meeting, first)
            for (seed, policy, first), meeting in zip(runs, (one, other), strict=True)
        ]
    for (losses, parameters), run in zip(alone, started, strict=True):
        found, others = run.result()
        assert found == losses
        assert all(map(torch.equal, parameters, others))
    assert state() == before
