"""`tr.fit`: plans and sizes that fit, against measured bytes and a search over all sizes."""

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import skip_before_2_13
from tests.planning.models import GPT
from tests.planning.models import mlp as layers
from torchremat.errors import ArgumentTypeError, ArgumentValueError, BudgetError
from torchremat.measure import LiveBytes


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, input):
        return self.layers(input).square().mean()


def mlp():
    return WithLoss()


def measure_bytes(model, *args):
    """The parameters, the arguments, and the measured peak of a step, its gradients included."""
    model(*args).sum().backward()
    model.zero_grad(set_to_none=True)
    resident = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *args))
    with LiveBytes() as memory:
        model(*args).sum().backward()
    model.zero_grad(set_to_none=True)
    return resident + memory.peak


def tokens(batch, length=16):
    return torch.zeros(batch, length, dtype=torch.long)


def test_a_step_that_fits_needs_no_plan_and_takes_the_measured_bytes():
    model, x = mlp(), torch.randn(64, 32)
    found = tr.fit(model, x, memory="1GiB", apply=True)
    assert found.plan is None and found.policy is None and not found.applied
    assert found.fits and found.added_seconds == 0
    assert found.peak_bytes == found.plain_bytes == measure_bytes(model, x)


def test_a_plan_that_is_applied_keeps_the_measured_bytes_within_the_memory():
    model, x = mlp(), torch.randn(512, 32)
    plain = measure_bytes(model, x)
    gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    memory = plain * 6 // 10
    found = tr.fit(model, x, memory=memory, apply=True)
    assert found.applied and found.peak_bytes <= memory < found.plain_bytes == plain
    assert found.added_seconds == found.plan.recompute_seconds > 0
    assert measure_bytes(model, x) <= memory
    again = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(map(torch.equal, again, gradients))


def least_bytes(model, x):
    """The memory that the plan of least peak takes, by a trace of this size alone."""
    try:
        return tr.fit(model, x, memory=1)
    except BudgetError as error:
        return error.least_bytes


def test_the_largest_batch_is_the_largest_of_all_that_are_tried():
    model, memory = mlp(), 600_000
    found = tr.fit(model, torch.randn(64, 32), memory=memory, maximize="batch")
    assert found.plain_size < found.size and found.peak_bytes <= memory
    assert found.num_traces == 2 and not found.notes
    assert least_bytes(model, torch.randn(found.size, 32)) <= memory
    assert least_bytes(model, torch.randn(found.size + 1, 32)) > memory
    sizes = range(found.plain_size - 1, found.plain_size + 3)
    plain = [n for n in sizes if measure_bytes(model, torch.randn(n, 32)) <= memory]
    assert max(plain) == found.plain_size
    x = torch.randn(found.size, 32)
    tr.nn.wrap(model, found.policy)
    assert measure_bytes(model, x) <= memory


def test_the_model_may_be_on_the_meta_device_and_the_step_in_need_of_an_optimizer():
    skip_before_2_13(
        "torch.matmul of batches reads sizes as numbers, so that each length is traced"
    )
    with torch.device("meta"):
        model, x = GPT(layers=1, width=32), tokens(2)
    memory, optimizer = 800_000, torch.optim.AdamW
    found = tr.fit(model, x, memory=memory, optimizer=optimizer, maximize="batch", seconds=2)
    parameters = sum(p.nbytes for p in model.parameters())
    assert found.resident_bytes > 3 * parameters
    assert found.size > 2 and found.peak_bytes <= memory
    assert all(p.is_meta for p in model.parameters())


def test_a_size_that_the_function_refuses_is_named():
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            assert x.shape[1] <= 24, "at most 24 positions"
            return self.layer(x).tanh().sum()

    found = tr.fit(Short(), torch.ones(2, 8, 8), memory="1GiB", maximize="length")
    assert found.size == found.plain_size == 24 and found.next_bytes is None
    assert "length 25 raises AssertionError: at most 24 positions" in found.notes
    assert "at most 24 positions" in str(found)


class Groups(nn.Module):
    """It takes multiples of 4 alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x.view(x.shape[0] // 4, 4, 16)).tanh().mean(1).square().sum()


class Branching(nn.Module):
    """It takes less memory for 65 rows than for 64."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        if x.shape[0] > 64:
            x = x[: x.shape[0] // 4]
        return self.down(self.up(x).tanh().sin().exp()).square().sum()


def fits(model, size, memory):
    """Whether a step of this size fits, as a plan of it alone says; refused sizes do not."""
    try:
        return tr.fit(model, torch.zeros(size, 16), memory=memory).fits
    except BudgetError:
        return False
    except RuntimeError as error:
        assert "is invalid for input of size" in str(error)
        return False


@pytest.mark.parametrize(
    ("module", "memory", "unit"), [(Groups, 20_000, 4), (Branching, 60_000, 1)]
)
def test_the_size_is_the_last_of_all_where_sizes_are_refused_or_memory_falls(module, memory, unit):
    model = module()
    found = tr.fit(model, torch.zeros(16, 16), memory=memory, maximize="batch")
    assert found.unit == unit
    assert (
        measure_bytes(
            tr.nn.wrap(module(), found.policy) if found.plan else module(),
            torch.zeros(found.size, 16),
        )
        <= memory
    )
    end = found.most_size + 3 * unit
    assert [n for n in range(found.size, end) if fits(model, n, memory)] == [found.size]


def test_memory_that_falls_with_the_size_is_looked_for_beyond_what_fits():
    model, memory = Branching(), 45_000
    assert not fits(model, 64, memory)
    found = tr.fit(model, torch.zeros(4, 16), memory=memory, maximize="batch")
    assert found.size > 64 and fits(model, found.size, memory)
    assert not fits(model, found.size + 1, memory)


def test_a_search_that_has_no_time_says_what_it_did_not_try():
    skip_before_2_13(
        "torch.matmul of batches reads sizes as numbers, so that each length is traced"
    )
    model, x = GPT(layers=2, width=32), tokens(2)
    found = tr.fit(model, x, memory=700_000, maximize="batch", seconds=0.01)
    assert found.size >= found.plain_size and found.peak_bytes <= found.memory
    (note,) = found.notes
    assert note.startswith(f"The time of the search was over: from batch {found.size + 1} on")


def test_a_function_that_needs_the_very_size_is_traced_at_each():
    def fixed(x, w):
        return (x * len(range(x.shape[0])) @ w).tanh().sum()

    x, w = torch.ones(4, 64), torch.ones(64, 64, requires_grad=True)
    found = tr.fit(fixed, x, w, memory="100KiB", maximize="batch")
    assert found.size == found.plain_size or found.plan is not None
    assert found.num_traces > 2
    assert "Each size was traced by itself, since the function needs the very size" in str(found)
    with pytest.raises(BudgetError):
        tr.fit(fixed, torch.ones(found.size + 1, 64), w, memory="100KiB")


@pytest.mark.slow
def test_a_trace_with_a_symbol_serves_though_its_graph_has_other_operators():
    skip_before_2_13(
        "torch.matmul of batches reads sizes as numbers, so that each length is traced"
    )
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=100, n_positions=32, bos_token_id=1,
        eos_token_id=1, use_cache=False, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = transformers.GPT2LMHeadModel(config), tokens(2)
    options = {"input_ids": ids, "labels": ids, "memory": "2MiB"}
    found = tr.fit(model, maximize="batch", **options)
    assert found.num_traces == 2 and found.fits and found.size > 1.3 * found.plain_size
    assert "Each size" not in str(found)


def test_dimensions_of_arguments_go_by_number():
    def masked(x, mask):
        return (x * mask).tanh().sum()

    x, mask = torch.ones(4, 8, requires_grad=True), torch.ones(8)
    found = tr.fit(masked, x, mask, memory="64KiB", maximize="x.1, mask.0")
    assert found.size > 8
    with pytest.raises(ArgumentValueError, match=r"'x.2'.* has the shape \(4, 8\)"):
        tr.fit(masked, x, mask, memory="64KiB", maximize="x.2")
    with pytest.raises(ArgumentValueError, match=r"x.0 is 4, mask.0 is 8"):
        tr.fit(masked, x, mask, memory="64KiB", maximize="x.0, mask.0")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": "50%"}, ArgumentTypeError, "memory is bytes, or text such as '24GiB'"),
        ({"maximize": "bach"}, ArgumentValueError, "nearest: 'batch'"),
        ({"maximize": "inpt.0"}, ArgumentValueError, "nearest: 'input.0'"),
        ({"maximize": 0}, ArgumentTypeError, "names no dimension"),
    ],
)
def test_wrong_options_say_what_to_write(options, error, message):
    with pytest.raises(error, match=message):
        tr.fit(mlp(), torch.randn(4, 32), **{"memory": "1GiB", **options})


def test_a_function_is_not_wrapped():
    with pytest.raises(ArgumentTypeError, match=r"policy=fit\(\.\.\.\)\.policy"):
        tr.fit(lambda x: x.sin().sum(), torch.ones(4), memory="1GiB", apply=True)


def test_memory_that_is_too_small_says_the_least_that_would_do():
    model, x = mlp(), torch.randn(64, 32)
    with pytest.raises(BudgetError, match="the step does not fit. The least that was found"):
        tr.fit(model, x, memory="40KiB")
    with pytest.raises(BudgetError, match="batch 1 does not fit") as raised:
        tr.fit(model, x, memory="40KiB", maximize="batch")
    found = tr.fit(model, x[:1], memory=raised.value.least_bytes)
    assert found.fits


def test_a_fit_shows_itself():
    found = tr.fit(mlp(), torch.randn(512, 32), memory="600KB", maximize="batch")
    assert repr(found).startswith(f"Fit(batch {found.size}, ") and "\n" not in repr(found)
    assert f"{found.plain_size} without a plan" in str(found)
    assert "largest batch" in found._repr_html_()


def test_a_step_fits_with_updates_in_the_backward_pass():
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
    x, optimizer = torch.ones(2, 128), torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = sum(p.nbytes for p in model.parameters())
    found = tr.fit(model, x, memory=int(1.3 * parameters), optimizer=optimizer, apply=True)
    assert found.plan.updates_in_backward == 16
    assert found.peak_bytes <= found.memory < found.plain_bytes
    with tr.measure.LiveBytes() as memory:
        model(x).sum().backward()
    assert memory.peak <= found.memory - found.resident_bytes
    with pytest.raises(tr.BudgetError, match="does not fit"):
        tr.fit(model, x, memory=parameters, optimizer=optimizer)
