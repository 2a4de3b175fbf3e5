"""The loop with and without it: the same parameters, and the same state, to the bit."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

import torchremat as tr
from tests.helpers import assert_freed
from torchremat.errors import StepInBackwardError, StepInBackwardWarning
from torchremat.measure import LiveBytes
from torchremat.optim import step_in_backward
from torchremat.optim.spent_gradient import SpentGradient

STEPS = 3
KINDS = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
]
WHOLE = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""One needs a closure, the other gradients that are sparse."""


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def make(kind=torch.optim.AdamW, **settings):
    model = make_model()
    chosen = [p for p in model.parameters() if kind is not torch.optim.Muon or p.ndim == 2]
    return model, kind(chosen, **{"lr": 0.1, **settings})


def loss_of(model, step=0):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
    return model(x).square().sum()


def train(model, optimizer, backward=torch.Tensor.backward, passes=1, clip=None):
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(passes):
            backward(loss_of(model, step * passes + i))
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
    return list(model.parameters()), optimizer.state_dict()


def assert_same(one, other):
    assert all(torch.equal(p, q) for p, q in zip(one[0], other[0], strict=True))
    assert repr(one[1]) == repr(other[1])


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in WHOLE], ids=lambda k: k.__name__)
def test_every_optimizer_gives_the_parameters_and_the_state_of_its_step(kind):
    plain = train(*make(kind))
    model, optimizer = make(kind)
    step_in_backward(optimizer)
    assert_same(train(model, optimizer), plain)
    assert type(model[0].weight.grad) is SpentGradient


VARIANTS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "lr in a tensor": {"lr": torch.tensor(0.1), "foreach": False},
    "amsgrad": {"amsgrad": True, "maximize": True},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_settings_of_adamw(settings):
    plain = train(*make(**settings))
    model, optimizer = make(**settings)
    step_in_backward(optimizer)
    assert_same(train(model, optimizer), plain)


def test_parameters_with_names():
    found = []
    for is_stepping in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        if is_stepping:
            step_in_backward(optimizer)
        found.append(train(model, optimizer))
    assert_same(*found)
    assert found[1][1]["param_groups"][0]["param_names"] == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("way", ["kept", "two passes"])
def test_gradients_are_clipped_by_their_global_norm(way, passes):
    norms = []
    plain = train(*make(), passes=passes, clip=lambda ps: norms.append(clip_grad_norm_(ps, 0.5)))
    model, optimizer = make()
    stepping = step_in_backward(optimizer, max_norm=0.5, accumulate=passes)
    backward = stepping.backward if way == "two passes" else torch.Tensor.backward
    assert_same(train(model, optimizer, backward, passes), plain)
    assert stepping.total_norm == norms[-1]
    assert norms[-1] > 0.5


def test_two_passes_are_one_where_a_gradient_is_there_already():
    found = []
    for way in ("plain", "two passes"):
        model, optimizer = make(torch.optim.SGD)
        loss_of(model, 1).backward()
        if way == "plain":
            loss_of(model).backward()
            clip_grad_norm_(model.parameters(), 0.5)
        else:
            step_in_backward(optimizer, max_norm=0.5).backward(loss_of(model))
        optimizer.step()
        found.append((list(model.parameters()), optimizer.state_dict()))
    assert_same(*found)


def test_the_last_of_several_passes_updates():
    plain = train(*make(), passes=3)
    model, optimizer = make()
    step_in_backward(optimizer, accumulate=3)
    assert_same(train(model, optimizer, passes=3), plain)


def test_a_scheduler_and_groups_with_other_settings():
    found = []
    for is_stepping in (False, True):
        model = make_model()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        if is_stepping:
            step_in_backward(optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            scheduler.step()
        found.append((list(model.parameters()), optimizer.state_dict()))
    assert_same(*found)


def test_a_checkpointed_optimizer_goes_on():
    plain_model, plain_optimizer = make()
    plain = train(plain_model, plain_optimizer), train(plain_model, plain_optimizer)
    model, optimizer = make()
    with step_in_backward(optimizer):
        state = copy.deepcopy(train(model, optimizer)[1])
    other = torch.optim.AdamW(model.parameters(), lr=0.7)
    with step_in_backward(other):
        other.load_state_dict(state)
        assert_same(train(model, other), plain[1])


def test_a_closure_runs_in_the_step():
    plain = train(*make())
    model, optimizer = make()
    step_in_backward(optimizer)
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
    assert_same((list(model.parameters()), optimizer.state_dict()), plain)


def test_what_got_no_gradient_or_came_later_is_left_to_the_step():
    found = []
    for is_stepping in (False, True):
        model, optimizer = make()
        extra, unused = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(2))
        if is_stepping:
            step_in_backward(optimizer)
        optimizer.add_param_group({"params": [extra, unused]})
        for step in range(STEPS):
            optimizer.zero_grad()
            (loss_of(model, step) + (extra * step).sum()).backward()
            optimizer.step()
        assert unused.grad is None
        found.append(([*model.parameters(), extra, unused], optimizer.state_dict()))
    assert_same(*found)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_that_is_differentiated_again_is_kept():
    found = []
    for is_stepping in (False, True):
        model, optimizer = make()
        if is_stepping:
            step_in_backward(optimizer)
        loss_of(model).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()  # else it holds the graph
        found.append((list(model.parameters()), optimizer.state_dict()))
    assert_same(*found)


@pytest.mark.parametrize("wrap", ["whole", "blocks", "torch.utils.checkpoint", "torch.compile"])
def test_under_checkpoints(wrap):
    plain = train(*make())
    model, optimizer = make()
    if wrap == "torch.compile":
        model.compile(backend="torchremat", options={"policy": "dots", "codegen": "eager"})
    elif wrap == "torch.utils.checkpoint":
        layers = model
        model = nn.Module()
        model.parameters = layers.parameters
        model.forward = lambda x: torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=False)
    else:
        tr.nn.wrap(model, **({"select": "*"} if wrap == "blocks" else {}))
    step_in_backward(optimizer)
    assert_same(train(model, optimizer), plain)


def make_deep(width=256, depth=8):
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)])


@pytest.mark.parametrize("wrap", [None, "blocks"])
def test_gradients_are_not_alive_together(wrap):
    peaks = []
    for is_stepping in (False, True):
        model = make_deep()
        if wrap is not None:
            tr.nn.wrap(model, select="*")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if is_stepping:
            step_in_backward(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            with LiveBytes() as memory:
                model(torch.ones(4, 256)).sum().backward()
                optimizer.step()
        peaks.append(memory.peak)
    gradient = 4 * 256 * 256
    assert peaks[0] > 8 * gradient
    assert peaks[1] < 3 * gradient


def test_norms_are_those_of_the_gradients():
    norms = []
    for is_stepping in (False, True):
        model, optimizer = make()
        if is_stepping:
            step_in_backward(optimizer, norms=True)
        loss_of(model).backward()
        one = model[0].weight.grad.norm(), torch.linalg.vector_norm(model[2].bias.grad)
        norms.append((*one, get_total_norm([p.grad for p in model.parameters()])))
    assert norms[0] == norms[1]


def test_clipping_that_clips_nothing_warns():
    plain = train(*make(), clip=lambda ps: clip_grad_norm_(ps, 1e9))
    model, optimizer = make()
    step_in_backward(optimizer, norms=True)
    with pytest.warns(StepInBackwardWarning, match="a norm above the limit will be an error"):
        found = train(model, optimizer, clip=lambda ps: clip_grad_norm_(ps, float("inf")))
    assert_same(found, plain)


def make_scaler():
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler


READERS = {
    "clip": lambda model, optimizer: clip_grad_norm_(model.parameters(), 1.0),
    "sum": lambda model, optimizer: model[0].weight.grad.sum(),
    "largest": lambda model, optimizer: model[0].weight.grad.norm(float("inf")),
    "norm of a row": lambda model, optimizer: model[0].weight.grad.norm(dim=0),
    "second pass": lambda model, optimizer: loss_of(model).backward(),
    "set to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "unscale": lambda model, optimizer: make_scaler().unscale_(optimizer),
    "float": lambda model, optimizer: float(model[0].weight.grad[0, 0]),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("norms", [False, True])
def test_who_reads_a_gradient_that_is_gone_is_told(reader, norms):
    model, optimizer = make()
    step_in_backward(optimizer, norms=norms)
    loss_of(model).backward()
    with pytest.raises(StepInBackwardError, match=r"max_norm=.*accumulate=.*norms=True"):
        reader(model, optimizer)


def test_a_setting_that_changes_too_late_is_an_error():
    model, optimizer = make()
    step_in_backward(optimizer)
    loss_of(model).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StepInBackwardError, match="'lr' of the optimizer was 0.1 .* is 0.5"):
        optimizer.step()


class OfAllGradients(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure=None):
        clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Has a count for all parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Around(Optimizer):
    """Steps another optimizer."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OfAllGradients, "another value when the others are not there"),
        (Counting, "writes settings that all parameters share"),
        (torch.optim.LBFGS, "missing 1 required positional argument: 'closure'"),
        (lambda ps, lr: Around(torch.optim.SGD(ps, lr)), "steps another optimizer, .inner"),
    ],
)
def test_an_optimizer_of_all_parameters_at_once_is_refused(kind, reason):
    model, optimizer = make(kind)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(StepInBackwardError, match=reason):
        step_in_backward(optimizer)
    assert repr(model.state_dict()) == repr(before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert not optimizer.state


def test_remove_undoes_it():
    model, optimizer = make()
    plain = train(*make())
    with step_in_backward(optimizer) as stepping:
        loss_of(model).backward()
        with pytest.raises(StepInBackwardError, match="already"):
            step_in_backward(optimizer)
        assert repr(stepping) == "StepInBackward(AdamW)"
    assert model[0].weight.grad is None
    model, optimizer = make()
    step_in_backward(optimizer).remove()
    assert_same(train(model, optimizer), plain)
    assert type(model[0].weight.grad) is torch.Tensor


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"max_norm": 0}, ValueError),
        ({"accumulate": 0}, ValueError),
        ({"accumulate": 1.5}, ValueError),
    ],
)
def test_bad_settings(settings, kind):
    with pytest.raises(kind, match=f"{next(iter(settings))}="):
        step_in_backward(make()[1], **settings)


def test_no_optimizer():
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer"):
        step_in_backward(torch.optim.SGD)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(StepInBackwardError, match="several processes are summed"):
        step_in_backward(make()[1])


def test_an_optimizer_that_is_dropped_is_freed_with_its_parameters():
    model, optimizer = make()
    step_in_backward(optimizer)
    train(model, optimizer)
    references = [weakref.ref(thing) for thing in (optimizer, model, model[0].weight)]
    del model, optimizer
    gc.collect()
    assert_freed(*references)
