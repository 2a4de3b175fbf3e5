"""One budget for the graphs between graph breaks."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.compile.dynamo.steps import WIDTH, Part, peak_of_second, step_of
from tests.helpers import one_in, peak_of
from torchremat.checkpoint_policies import memory_budget
from torchremat.compile.dynamo import fragments
from torchremat.errors import BudgetError, BudgetWarning


class Broken(nn.Module):
    """A graph break after each part but the last."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x):
        x = self.parts[0](x)
        torch._dynamo.graph_break()
        x = self.parts[1](x)
        torch._dynamo.graph_break()
        return self.parts[2](x).sum()


class Called(nn.Module):
    """A graph break in a loop: Dynamo runs that, and each part is a graph with the same code."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
        return x.sum()


@pytest.fixture(autouse=True)
def _without_old_code():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def check(model, x, policy):
    """The peaks of plain PyTorch and of four compiled steps, all equal to it to the bit."""
    options = {"policy": policy, "codegen": "eager"}
    expected, plain = peak_of_second(model, model, x)
    run = torch.compile(model, backend="torchremat", options=options)
    peaks = []
    for _ in range(4):
        found, peak = peak_of(step_of(model, run, x))
        assert all(map(torch.equal, found, expected))
        peaks.append(peak)
    return plain, peaks


@pytest.mark.parametrize("percent", [80, 60, 40])
def test_a_percentage_is_of_the_whole_step(percent):
    plain, peaks = check(Broken(), torch.randn(1024, WIDTH), f"budget:{percent}%")
    assert all(peak <= percent / 100 * plain for peak in peaks[1:])
    assert peaks[-1] >= (percent - 20) / 100 * plain  # it saves what the budget allows


def test_bytes_are_of_the_whole_step():
    x = torch.randn(1024, WIDTH)
    limit = 2_000_000
    plain, peaks = check(Broken(), x, memory_budget(limit))
    assert plain > limit >= max(peaks[1:])


def test_a_budget_that_does_not_bind_saves_all():
    plain, peaks = check(Broken(), torch.randn(256, WIDTH), "budget:8GiB")
    assert peaks[-1] == pytest.approx(plain, rel=0.05)


def test_least_and_time():
    x = torch.randn(1024, WIDTH)
    plain, least = check(Broken(), x, "budget:least")
    torch._dynamo.reset()
    _, timed = check(Broken(), x, "budget:time:+10%")
    assert least[-1] < 0.35 * plain
    assert least[-1] < timed[-1] < plain


def test_one_graph_that_runs_many_times():
    x = torch.randn(1024, WIDTH)
    plain, peaks = check(Called(), x, "budget:60%")
    assert all(peak <= 0.6 * plain for peak in peaks[1:])


class Summed(Part):
    def forward(self, x):
        return super().forward(x).sum()


def test_one_graph_has_the_budget_from_the_first_step():
    plain, peaks = check(Summed(9), torch.randn(1024, WIDTH), "budget:60%")
    assert max(peaks) <= 0.6 * plain
    torch._dynamo.reset()
    with pytest.raises(BudgetError):
        check(Summed(9), torch.randn(1024, WIDTH), "budget:1%")


@pytest.mark.parametrize("autocasts", [False, True])
def test_a_budget_that_cannot_be_met_raises_before_there_is_a_gradient(autocasts):
    model, x = Broken(), torch.randn(512, WIDTH)

    def compile_for(policy):
        torch._dynamo.reset()
        options = {"policy": policy, "codegen": "eager"}
        return torch.compile(model, backend="torchremat", options=options)

    def find_loss(run):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            return run(x).float().sum()

    loss = find_loss(compile_for(memory_budget(50_000)))
    with pytest.raises(BudgetError, match=r"over the 3 graphs between graph breaks") as caught:
        loss.backward()
    assert all(p.grad is None for p in model.parameters())

    least = caught.value.least_bytes
    run = compile_for(memory_budget(least, on_infeasible="error"))
    plain_loss = find_loss(model)
    plain = torch.autograd.grad(plain_loss, list(model.parameters()))
    for _ in range(3):
        model.zero_grad()
        loss = find_loss(run)
        loss.backward()
        assert torch.equal(loss, plain_loss)
        assert all(map(torch.equal, (p.grad for p in model.parameters()), plain))
    del loss, plain_loss, plain
    model.zero_grad()

    def step():
        find_loss(run).backward()

    _, peak = peak_of(step, counts_workspaces=not autocasts)
    assert peak <= least


def test_a_budget_that_cannot_be_met_later_is_a_warning():
    model = Broken()
    options = {"policy": memory_budget(1_000_000), "codegen": "eager"}
    run = torch.compile(model, backend="torchremat", options=options)
    for _ in range(2):
        run(torch.randn(64, WIDTH)).backward()
    with pytest.warns(BudgetWarning, match=r"between graph breaks") as caught:
        for _ in range(4):
            run(torch.randn(4096, WIDTH)).backward()
    assert len([w for w in caught if w.category is BudgetWarning]) == 1


def test_other_sizes_evaluation_and_accumulation():
    model = Broken()
    run = torch.compile(
        model, backend="torchremat", options={"policy": "budget:60%", "codegen": "eager"}
    )
    for rows in (64, 96, 128, 80, 64, 112):
        x = torch.randn(rows, WIDTH)
        with torch.no_grad():
            assert torch.equal(run(x), model(x))
        model.zero_grad()
        for _ in range(2):
            run(x).backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        for _ in range(2):
            model(x).backward()
        assert all(map(torch.equal, found, [p.grad for p in model.parameters()]))


class Passing(nn.Module):
    """Between its graphs pass values that autograd does not keep, and some that it does."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x):
        y = self.parts[0](x) + x
        torch._dynamo.graph_break()
        z = self.shift(y)
        torch._dynamo.graph_break()
        y = self.parts[1](z) + y
        torch._dynamo.graph_break()
        z = self.shift(y)
        torch._dynamo.graph_break()
        return (self.parts[2](z) + y).sum()

    def shift(self, y):
        z = (y * 2).roll(1, 0)
        torch._dynamo.graph_break()
        z = (z * 2).roll(1, 0)
        torch._dynamo.graph_break()
        return (z * 2).roll(1, 0)


@pytest.mark.parametrize("share", one_in(3, [0.7, 0.9, 0.5]))
def test_what_autograd_does_not_keep_does_not_count(share):
    model, x = Passing(), torch.randn(1024, WIDTH)
    _, plain = peak_of_second(model, model, x)
    limit = int(share * plain)
    _, peaks = check(model, x, memory_budget(limit))
    assert limit - 0.2 * plain <= max(peaks[1:]) <= limit
    _, (*_, peak) = check(model, x, memory_budget(int(1.04 * plain)))  # Dynamo's frames hold `y`
    assert peak == pytest.approx(plain, rel=0.04)


class Counts(nn.Module):
    """Dynamo compiles it anew for a number that changes."""

    def __init__(self):
        super().__init__()
        self.part, self.calls = Part(), 0

    def forward(self, x):
        self.calls += 1
        return (self.part(x) * self.calls).sum()


def test_a_graph_that_is_compiled_anew_has_the_whole_budget():
    model, x = Counts(), torch.randn(1024, WIDTH)
    _, plain = peak_of_second(model, model, x)
    options = {"policy": "budget:70%", "codegen": "eager"}
    run = torch.compile(model, backend="torchremat", options=options)
    for _ in range(3):
        step_of(model, run, x)()
    _, peak = peak_of(step_of(model, run, x))
    assert 0.5 * plain <= peak <= 0.7 * plain


class Branching(Broken):
    """Its middle part runs only where it is told to."""

    def forward(self, x, is_long):
        x = self.parts[0](x)
        torch._dynamo.graph_break()
        if is_long:
            x = self.parts[1](x)
            torch._dynamo.graph_break()
        return self.parts[2](x).sum()


def test_a_graph_that_joins_later_shares_the_budget_of_the_whole_step():
    model, x = Branching(), torch.randn(512, WIDTH)
    step_of(model, lambda x: model(x, True), x)()
    expected, plain = peak_of(step_of(model, lambda x: model(x, True), x))
    limit = int(0.6 * plain)
    options = {"policy": memory_budget(limit), "codegen": "eager"}
    run = torch.compile(model, backend="torchremat", options=options)
    for _ in range(3):
        step_of(model, lambda x: run(x, False), x)()
    for i in range(4):
        found, peak = peak_of(step_of(model, lambda x: run(x, True), x))
        assert all(map(torch.equal, found, expected))
        assert peak <= limit or i == 0  # the first graph has run when the new one is met


def test_calls_without_a_backward_pass_do_not_count():
    model, x = Broken(), torch.randn(512, WIDTH)
    expected, plain = peak_of_second(model, model, x)
    options = {"policy": "budget:60%", "codegen": "eager"}
    run = torch.compile(model, backend="torchremat", options=options)
    for _ in range(100):
        run(x)  # evaluated, with gradients enabled
    job = fragments.job_of(options, lambda: pytest.fail("it has a job"))
    assert len(job._calls) <= 2 * fragments._FIRST_LOOK
    step_of(model, run, x)()
    assert not job.has_new
    for _ in range(2):
        found, peak = peak_of(step_of(model, run, x))
        assert all(map(torch.equal, found, expected))
        assert peak <= 0.6 * plain


def test_what_it_compiled_is_freed():
    model = Broken()
    run = torch.compile(
        model, backend="torchremat", options={"policy": "budget:60%", "codegen": "eager"}
    )
    x = torch.randn(64, WIDTH)
    for _ in range(3):
        run(x).backward()
    references = [weakref.ref(p) for p in model.parameters()]
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert not any(reference() is not None for reference in references)


class Views(nn.Module):
    """Between its parts is a graph that returns a view of its input, and has nothing to derive."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x):
        x = self.parts[0](x)
        torch._dynamo.graph_break()
        x = x.view(-1)[: len(x) // 2 * WIDTH]
        torch._dynamo.graph_break()
        return self.parts[1](x.view(-1, WIDTH)).sum()


def test_a_graph_of_views_takes_no_part():
    plain, peaks = check(Views(), torch.randn(1024, WIDTH), "budget:80%")
    workspaces = 0.02 * plain  # of the plan's products, which some CPUs' kernels do without
    assert max(peaks[1:]) <= 0.8 * plain + workspaces
