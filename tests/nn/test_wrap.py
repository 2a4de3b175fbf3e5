import copy
import gc
import inspect
import io
import pickle
import threading
import warnings
import weakref
from functools import partial
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchremat import config
from torchremat.checkpoint_policies import (
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    save_modules,
)
from torchremat.errors import (
    ConcretizationError,
    NoMatchError,
    NoStepError,
    TorchrematError,
    UnmatchedWarning,
)  # fmt: skip
from torchremat.nn import report, unwrap, wrap
from torchremat.remat.module_forward import RematForward, remat_forward_of

WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.proj((scores @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + scale * self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, num_layers=4, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


TOKENS = torch.arange(12).reshape(2, 6) % 11


def make_model(num_layers=4, dropout=0.0):
    torch.manual_seed(0)
    return Model(num_layers, dropout)


def step(model, *inputs):
    """The loss and the gradients of a training step, by name."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(*(inputs or (TOKENS,)))
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    different = [
        name
        for name, value in expected.items()
        if (value is None) != (found[name] is None)
        or (value is not None and not torch.equal(found[name], value))
    ]
    assert different == []


def wrapped_names(model):
    return [name for name, module in model.named_modules() if remat_forward_of(module) is not None]


# --- values and gradients ------------------------------------------------------------------------

SELECTIONS = {
    "the model": (None, [""]),
    "pattern": ("layers.*", [f"layers.{i}" for i in range(4)]),
    "deep pattern": ("**.mlp", [f"layers.{i}.mlp" for i in range(4)]),
    "nested pattern": ("layers.0,layers.0.*", None),
    "excluded": ("layers.*,!layers.0", [f"layers.{i}" for i in (1, 2, 3)]),
    "every": ("every:3", ["layers.0", "layers.3"]),
    "first and last": ("first:1,last:1", ["layers.0", "layers.3"]),
    "range": ("range:1-2", ["layers.1", "layers.2"]),
    "class": (Block, [f"layers.{i}" for i in range(4)]),
    "predicate": (lambda module: isinstance(module, Attention), None),
    "named predicate": (lambda name, module: name.endswith("2.attn"), ["layers.2.attn"]),
}


@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.sampled(3)
def test_steps_are_bit_equal(kind):
    select, names = SELECTIONS[kind]
    model = make_model()
    assert wrap(model, select=select) is model
    assert names is None or wrapped_names(model) == names
    for _ in range(3):
        assert_same(step(model), step(make_model()))


def save_all(op, *avals, **params):
    return True


@pytest.mark.parametrize(
    "policy",
    [None, "dots", "none", dots_with_no_batch_dims_saveable, "ops:aten.mm", save_all],
)
def test_steps_are_bit_equal_under_each_policy(policy):
    model = wrap(make_model(2), policy, select="layers.*")
    for _ in range(2):
        assert_same(step(model), step(make_model(2)))


def test_a_training_run_is_bit_equal():
    models = [make_model(2), wrap(make_model(2), select="layers.*")]
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    for _ in range(4):
        assert_same(*(step(model) for model in models))
        for optimizer in optimizers:
            optimizer.step()


def test_gradients_of_inputs_and_second_derivatives():
    results = []
    for prepare in (lambda block: block, wrap):
        torch.manual_seed(0)
        block = prepare(Block(0.0).double())
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
        (dx,) = torch.autograd.grad(block(x).sin().sum(), x, create_graph=True)
        results.append([dx, *torch.autograd.grad(dx.square().sum(), [x, *block.parameters()])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_keywords_numbers_and_trees():
    class Net(nn.Module):
        def forward(self, pair, *, scale=1, name=None):
            return {"out": pair[0].sin() * scale, "both": (pair[1] * pair[0], name)}

    x = torch.ones(3, requires_grad=True)
    net = wrap(Net())
    for scale in (2, 3):
        out = net([x, x * 2], scale=scale, name="a")
        assert torch.equal(out["out"], x.sin() * scale)
        assert out["both"][1] == "a"
        assert torch.equal(torch.autograd.grad(out["both"][0].sum(), x)[0], 4 * x)


def test_values_are_recomputed():
    counts = []
    for policy in ("none", None):
        model = wrap(make_model(2), policy, select="layers.*")
        step(model)
        held = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, held=held: held.append(t) or t, lambda t: t
        ):
            model(TOKENS)
        counts.append(len(held))
    assert counts[1] < counts[0]


def test_transformers_blocks():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    results = []
    for prepare in (lambda model: model, partial(wrap, select="transformer.h.*")):
        torch.manual_seed(0)
        model = prepare(transformers.GPT2LMHeadModel(config)).train()
        model.loss_type = "ForCausalLM"
        tokens = torch.randint(32, (2, 16))
        for _ in range(2):
            model.zero_grad()
            out = model(input_ids=tokens, labels=tokens)
            out.loss.backward()
        results.append(
            {"loss": out.loss.detach(), "logits": out.logits.detach()}
            | {n: p.grad for n, p in model.named_parameters()}
        )
    assert wrapped_names(model) == ["transformer.h.0", "transformer.h.1"]
    assert_same(results[1], results[0])


# --- as before -----------------------------------------------------------------------------------


def test_nothing_seen_from_outside_changes():
    plain, model = make_model(), wrap(make_model(), select="layers.*")
    assert_same(model.state_dict(), plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert isinstance(model.layers[0], Block)
    assert repr(unwrap(copy.deepcopy(model))) == repr(plain)
    model.load_state_dict(plain.state_dict())


def test_print_shows_what_is_wrapped():
    model = wrap(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), "full", select="*")
    wrap(model, "dots", select="*")
    for shown in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        lines = [line.strip() for line in repr(shown).splitlines()]
        assert lines[1] == (
            "(0): Linear(in_features=2, out_features=2, bias=True, checkpoint='dots')"
        )
        assert lines[2:4] == ["(1): Sequential(", "checkpoint='dots'"]
        assert shown[0].extra_repr.__self__ is shown[0].forward
    assert "checkpoint" not in repr(unwrap(model))


def test_an_extra_repr_of_the_module_itself_stays():
    linear = nn.Linear(2, 2)
    linear.extra_repr = lambda: "mine"
    assert repr(wrap(linear)) == repr(unwrap(linear)) == "Linear(mine)"


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: wrap(m, "50%"), r"a budget of peak memory is written 'budget:50%'"),
        (lambda m: wrap(m, 0.5), r"For a budget of peak memory, write memory_budget\(0.5\)"),
        (lambda m: wrap(m, budget="50%"), r"write budget='50%' as policy='budget:50%'"),
        (lambda m: wrap(m, use_reentrant=False), r"leave out use_reentrant"),
        (lambda m: wrap(m, polcy="dots"), r"there is no option 'polcy', nearest: 'policy'"),
        (lambda m: wrap(m, "dots", "every:2"), r"given by keyword, wrap\(model, 'dots', select="),
        (lambda m: wrap(list(m)), r"given a list. Wrap each: for block in blocks: wrap\(block"),
        (lambda m: wrap(nn.ModuleList(m)), r"select='\*' selects all of them"),
    ],
)
def test_what_others_call_it_says_what_to_write(call, match):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises((TypeError, ValueError), match=match) as info:
        call(model)
    assert isinstance(info.value, TorchrematError)
    assert "checkpoint" not in repr(model)


def test_the_report_of_a_compiled_model_says_where_reports_are():
    model = wrap(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), select="*")
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 2)).sum().backward()
    with pytest.raises(NoStepError, match=r"compiled by torch.compile.*options=\{'report': print"):
        report(compiled)
    model(torch.ones(1, 2)).sum().backward()
    assert report(compiled).by_decision() == report(model).by_decision()


def test_the_forward_looks_like_the_one_it_hides():
    block = wrap(Block(0.0))
    assert inspect.signature(block.forward) == inspect.signature(Block(0.0).forward)
    assert block.forward.__self__ is block
    assert block.forward.__code__ is Block.forward.__code__
    assert inspect.unwrap(block.forward.__func__) == MethodType(Block.forward, block)
    assert inspect.signature(block.forward.__func__) == inspect.signature(Block.forward)
    assert block.forward.__name__ == "forward"
    assert block.forward.__wrapped__ == MethodType(Block.forward, block)
    assert "nothing_saveable" in repr(block.forward)


def test_what_is_made_of_the_function_of_the_forward_runs_under_the_checkpoint():
    """A library that has a model run under autocast replaces its forward by such a method."""

    def decorated(function):
        return lambda module, *args: function(module, *args)

    block, x = wrap(Block(0.0)), torch.randn(2, 3, WIDTH, requires_grad=True)
    forward = block.forward
    for made in (
        MethodType(decorated(forward.__func__), block),
        MethodType(forward, block),
        decorated(forward.__func__).__get__(block),
    ):
        out = made(x)
        assert type(out.grad_fn).__name__ == "CheckpointBackward"
        assert torch.equal(out, Block.forward(block, x))
    other = Block(0.0)
    assert torch.equal(forward.__func__(other, x), other(x))


def test_hooks_run_as_often_and_in_order():
    logs = []
    for prepare in (lambda model: model, partial(wrap, select="layers.*")):
        model, log = prepare(make_model(2)), []
        first = model.layers[0]
        first.register_forward_pre_hook(lambda m, a, log=log: log.append("before block"))
        first.register_forward_hook(lambda m, a, o, log=log: log.append("after block"))
        first.register_full_backward_hook(lambda m, i, o, log=log: log.append("block backward"))
        model.register_forward_hook(lambda m, a, o, log=log: log.append("after model"))
        for _ in range(2):
            step(model)
        logs.append(log)
    assert logs[1] == logs[0]


def test_hooks_of_the_module_change_inputs_and_outputs():
    x = torch.ones(1, 2, WIDTH)
    results = []
    for prepare in (lambda block: block, wrap):
        torch.manual_seed(0)
        block = prepare(Block(0.0))
        block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        block.register_forward_hook(lambda m, args, out: out + 1)
        block.attn.register_forward_hook(lambda m, args, out: out * 3)
        results.append(step_of_block(block, x))
    assert_same(*results)


def step_of_block(block, x):
    block.zero_grad()
    out = block(x)
    out.square().sum().backward()
    return {"out": out.detach()} | {n: p.grad for n, p in block.named_parameters()}


def test_train_and_eval():
    plain, model = make_model(2, 0.5), wrap(make_model(2, 0.5), select="layers.*")
    for mode in (True, False, True, False):
        plain.train(mode)
        model.train(mode)
        assert model.layers[0].dropout.training is mode
        for _ in range(2):
            assert_same(step(model), step(plain))
    training, evaluating = step(model.train())["loss"], step(model.eval())["loss"]
    assert not torch.equal(training, evaluating)


def test_the_mode_of_one_part():
    plain, model = make_model(2, 0.5), wrap(make_model(2, 0.5), select="layers.*")
    for m in (plain, model):
        m.layers[0].dropout.eval()
    assert_same(step(model), step(plain))


def test_requires_grad_toggled():
    plain, model = make_model(2), wrap(make_model(2), select="layers.*")
    for frozen in (False, True, False):
        for m in (plain, model):
            m.layers[0].requires_grad_(not frozen)
            m.layers[1].attn.requires_grad_(not frozen)
            m.zero_grad()
        found = step(model)
        assert_same(found, step(plain))
        assert (found["layers.1.attn.proj.weight"] is None) == frozen


def test_no_grad_and_inference_mode():
    plain, model = make_model(2), wrap(make_model(2), select="layers.*")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = model(TOKENS)
            assert torch.equal(loss, plain(TOKENS))
        assert not loss.requires_grad
        assert_same(step(model), step(plain))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fast_paths_without_gradients_are_those_of_plain_modules(mode):
    torch.manual_seed(0)
    layer, attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.MultiheadAttention
    plain = nn.ModuleList([layer, attention(8, 2, batch_first=True)]).eval()
    model = wrap(copy.deepcopy(plain), select="*")
    x = torch.randn(2, 5, 8)
    with mode():
        assert torch.equal(model[0](x), plain[0](x))
        assert torch.equal(model[1](x, x, x)[0], plain[1](x, x, x)[0])
    assert torch.equal(model[0](x), plain[0](x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_in_inference_mode(kind):
    plain = kind(4, 8, 3, dropout=0.5)
    model, x = wrap(copy.deepcopy(plain)), torch.randn(5, 2, 4)
    found = []
    for m in (model, plain):
        torch.manual_seed(0)
        with torch.inference_mode():
            found.append((m(x)[0].clone(), torch.get_rng_state()))
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][0], found[1][0])  # an LSTM's kernel on a CPU has two forms


def test_autocast():
    plain, model = make_model(2), wrap(make_model(2), select="layers.*")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            losses = [m(TOKENS) for m in (plain, model)]
        assert torch.equal(*losses)
        assert_same(step(model), step(plain))


def test_buffers_are_written_once_a_step():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
    model = wrap(copy.deepcopy(plain))
    x = torch.randn(5, 3)
    for _ in range(3):
        for m in (plain, model):
            m(x).sum().backward()
    assert_same(model.state_dict(), plain.state_dict())


def test_parameters_set_anew():
    model = wrap(make_model(2), select="layers.*")
    step(model)
    plain = make_model(2)
    for m in (plain, model):
        m.layers[0].attn.proj.weight = nn.Parameter(torch.eye(WIDTH))
        m.layers[1].attn = plain.layers[0].attn if m is plain else m.layers[0].attn
    assert_same(step(model), step(plain))
    assert_same(step(model.double()), step(plain.double()))


def test_weight_sharing():
    models = [make_model(3), wrap(make_model(3), select="layers.*")]
    for model in models:
        model.layers[1].mlp = model.layers[0].mlp
        model.head.weight = model.embed.weight
        model.layers[2] = model.layers[0]
    assert_same(*(step(model) for model in reversed(models)))


def test_a_shared_module_is_wrapped_once():
    model = make_model(3)
    model.layers[2] = model.layers[0]
    wrap(model, select="layers.*")
    assert wrapped_names(model) == ["layers.0", "layers.1"]
    plain = make_model(3)
    plain.layers[2] = plain.layers[0]
    assert_same(step(model), step(plain))


def test_functional_call():
    model = wrap(make_model(2), select="layers.*")
    plain = make_model(2)
    state = {n: (p * 1.5).detach().requires_grad_() for n, p in plain.named_parameters()}
    grads = []
    for m in (model, plain):
        loss = torch.func.functional_call(m, state, (TOKENS,))
        grads.append(torch.autograd.grad(loss, list(state.values())))
    assert all(map(torch.equal, *grads))
    assert_same(step(model), step(plain))


def test_functional_gradients():
    grads = []
    for model in (make_model(2), wrap(make_model(2), select="layers.*")):

        def loss(state, tokens, model=model):
            return torch.func.functional_call(model, state, (tokens,))

        state = {n: p.detach() for n, p in model.named_parameters()}
        grads.append(torch.func.grad(loss)(state, TOKENS))
    assert_same(*grads)


def test_threads():
    model, plain = wrap(make_model(2), select="layers.*"), make_model(2)
    losses, expected = [], plain(TOKENS)
    threads = [threading.Thread(target=lambda: losses.append(model(TOKENS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 4
    assert all(torch.equal(loss, expected) for loss in losses)


# --- copies --------------------------------------------------------------------------------------


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", COPIES)
def test_copies_are_wrapped_and_independent(kind, has_run):
    model = wrap(make_model(2), "dots", select="layers.*")
    expected = step(make_model(2))
    if has_run:
        step(model)
    made = COPIES[kind](model)
    assert wrapped_names(made) == wrapped_names(model) == ["layers.0", "layers.1"]
    for block in (*made.layers, *model.layers):
        assert block.forward.__self__ is block
        assert block.forward.policy == dots_saveable
    assert made.layers[0].forward is not model.layers[0].forward
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    del model
    assert_same(step(made), expected)
    assert wrapped_names(unwrap(made)) == []
    assert_same(step(made), expected)


def test_a_copy_of_a_part():
    model = wrap(make_model(2), select="layers.*")
    block = copy.deepcopy(model.layers[0])
    assert block.forward.__self__ is block


def test_pickling_the_forward_alone():
    block = wrap(Block(0.0))
    forward, owner = pickle.loads(pickle.dumps((block.forward, block)))
    assert forward is owner.forward
    assert forward.__self__ is owner
    owner, forward = pickle.loads(pickle.dumps((block, block.forward)))
    assert forward is owner.forward


def test_a_policy_that_cannot_be_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(wrap(Block(0.0), lambda op, *avals, **params: True))


# --- wrapping and unwrapping ---------------------------------------------------------------------


def test_unwrap_restores_the_attributes():
    model = make_model(2)
    before = {name: list(vars(module).items()) for name, module in model.named_modules()}
    wrap(model, select="**")
    step(model)
    assert unwrap(model) is model
    after = {name: list(vars(module).items()) for name, module in model.named_modules()}
    for name, items in before.items():
        assert [key for key, _ in after[name]] == [key for key, _ in items]
        assert all(a is b for (_, a), (_, b) in zip(after[name], items, strict=True))
    assert_same(step(model), step(make_model(2)))


def test_hooks_that_a_refused_call_has_put_are_taken_away(monkeypatch):
    """With the attribute that says that they are there, or the next call would put them again."""

    class Recording(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.has_hooks, self.seen = nn.Tanh(), False, []

        def forward(self, x):
            if not self.has_hooks:
                self.inner.register_forward_hook(lambda *_: self.seen.append(1))
                self.has_hooks = True
            return self.inner(x) if x.sum() > 0 else x

    monkeypatch.setattr(config, "untraceable", "error")
    model = wrap(Recording())
    with pytest.raises(ConcretizationError):
        model(torch.ones(2))
    unwrap(model)(torch.ones(2))
    assert model.seen == [1]


def test_unwrapping_what_is_not_wrapped():
    model = make_model(2)
    assert unwrap(model) is model
    wrap(model, select="layers.*")
    unwrap(model.layers[0])
    assert wrapped_names(model) == ["layers.1"]
    unwrap(unwrap(model))
    assert wrapped_names(model) == []


def test_wrapping_twice_replaces_the_first():
    model = wrap(make_model(2), select="layers.*")
    step(model)
    wrap(model, "none", select="layers.0")
    assert model.layers[0].forward.policy == everything_saveable
    assert model.layers[1].forward.policy == nothing_saveable
    assert model.layers[0].forward.__wrapped__ == MethodType(Block.forward, model.layers[0])
    assert_same(step(model), step(make_model(2)))
    unwrap(model)
    assert "forward" not in vars(model.layers[0])


def test_a_forward_of_the_module_itself():
    block, x, scale = Block(0.0), torch.ones(1, 2, WIDTH), 2.0

    def forward(x):
        return Block.forward(block, x, scale=scale)

    block.forward = forward
    wrap(wrap(block), "dots")
    assert block.forward.__wrapped__ is forward
    assert torch.equal(block(x), forward(x))
    scale = 3.0
    assert torch.equal(block(x), forward(x))
    scale = 2.0
    assert torch.equal(block(x), forward(x))
    assert_same(step_of_block(block, x), step_of_block(unwrap(block), x))
    assert block.forward is forward


def test_forwards_of_the_module_itself_are_told_apart():
    block, x = nn.Identity(), torch.ones(2)
    for number in range(10):
        block.forward = lambda x, number=number: x * number
        assert torch.equal(wrap(block)(x), x * number)
        unwrap(block)
        gc.collect()


@pytest.mark.parametrize("make", [MethodType, partial])
def test_a_forward_that_is_patched_in(make):
    block, x = Block(0.0), torch.ones(1, 2, WIDTH)
    patched = make(lambda self, x: Block.forward(self, x) * 2, block)
    block.forward = patched
    expected = step_of_block(block, x)
    assert_same(step_of_block(wrap(block), x), expected)
    assert_same(step_of_block(block, x), expected)
    assert vars(unwrap(block))["forward"] is patched


def test_a_policy_for_each_pattern():
    model = wrap(make_model(), {"first:1": "none", "layers.*,!layers.3": "dots", "head": None})
    policies = {n: m.forward.policy for n, m in model.named_modules() if "forward" in vars(m)}
    assert policies == {
        "layers.0": everything_saveable,
        "layers.1": dots_saveable,
        "layers.2": dots_saveable,
        "head": nothing_saveable,
    }
    assert_same(step(model), step(make_model()))


def test_names_in_policies_are_counted_from_the_model():
    policies = [save_modules("layers.*.attn"), save_modules("layers.0.attn.proj", "layers.1.mlp")]
    for policy in policies:
        model = make_model(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnmatchedWarning)
            wrap(model, policy, select="**.attn,**.mlp" if policy is policies[1] else "layers.*")
            if policy is policies[0]:
                assert_same(step(model), step(make_model(2)))
    model = wrap(make_model(2), save_modules("layers.0.atn"), select="layers.0")
    with pytest.warns(UnmatchedWarning, match=r"nearest: 'layers\.0\.attn'"):
        step(model)


def test_wrapped_inside_wrapped():
    model = make_model(2)
    wrap(model, "dots", select="**.attn")
    wrap(model, select="layers.*")
    for _ in range(2):
        assert_same(step(model), step(make_model(2)))


def test_wrapping_a_part_of_what_has_run():
    model = wrap(make_model(2), save_all, select="layers.*")
    step(model)
    wrap(model, select="layers.0.attn")
    assert_same(step(model), step(make_model(2)))
    assert model.layers[0].attn.forward.last_program is not None
    wrap(model, "none", select="layers.0.attn")
    step(model)
    assert model.layers[0].attn.forward.last_program is not None


# --- memory --------------------------------------------------------------------------------------


def test_a_dropped_module_is_freed_at_once():
    model = wrap(make_model(2), select="layers.*,layers.*.attn")
    for _ in range(2):
        step(model)
    report(model)
    references = [weakref.ref(m) for m in (model, *model.layers)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [r() for r in references] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("select", ["layers.*", "layers.*,layers.*.attn"])
def test_all_that_was_traced_is_freed(select):
    model = wrap(make_model(2), select=select)
    step(model)
    references = [weakref.ref(value) for value in (*model.modules(), *model.parameters())]
    del model
    gc.collect()
    gc.collect()  # what ran inside another is found once that is gone
    assert [r() for r in references] == [None] * len(references)


def test_the_forward_alone():
    forward = wrap(Block(0.0)).forward
    with pytest.raises(ReferenceError, match=r"the module is gone\. Keep the module and call"):
        forward(torch.ones(1, 2, WIDTH))


def test_a_derivative_outlives_the_module():
    x = torch.ones(1, 2, WIDTH, requires_grad=True)
    out = wrap(Block(0.0))(x).sin().sum()
    (dx,) = torch.autograd.grad(out, x, create_graph=True)
    del out
    assert torch.autograd.grad(dx.square().sum(), x)[0].shape == x.shape


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: wrap(torch.sin), TypeError, "wrap takes an nn.Module, but it was given <built"),
        (lambda m: wrap(Model), TypeError, "was given the class Model"),
        (lambda m: wrap(m, 3), TypeError, "policy"),
        (lambda m: wrap(m, "dotz"), ValueError, "dots"),
        (lambda m: wrap(m, select=3), TypeError, "select must be a pattern"),
        (lambda m: wrap(m, select="layer.*"), NoMatchError, r"nearest: 'layers\.\d'"),
        (lambda m: wrap(m, select="every:0"), ValueError, "out of range: layers holds 4"),
        (lambda m: wrap(m.layers), ValueError, "a ModuleList has no forward of its own"),
        (lambda m: wrap(m, prevent_cse=1), TypeError, "prevent_cse must be a bool, or a tuple"),
        (lambda m: wrap(m, prevent_cse=(True, "no")), TypeError, "prevent_cse must be a bool"),
        (lambda m: wrap(m, compile="tvm"), ValueError, "compile='tvm' is not a backend"),
        (lambda m: wrap(m, compile=True), ValueError, "compile=True is not a backend"),
        (lambda m: wrap(m, {}), ValueError, "the dict of policies is empty"),
        (lambda m: wrap(m, {"layers.*": 3}), TypeError, "policy"),
        (lambda m: wrap(m, {None: "dots"}), TypeError, "one of them is None"),
        (lambda m: wrap(m, {"layers.*": "dots", "headd": "dots"}), NoMatchError, "nearest: 'head'"),
        (
            lambda m: wrap(m, {"layers.*": "dots", "layers.0": "none"}),
            ValueError,
            r"'layers\.0': everything_saveable has no effect.*Write the narrower pattern first",
        ),
        (
            lambda m: wrap(m, {"layers.*": "dots"}, select="layers.0"),
            ValueError,
            "both say which modules are meant",
        ),
    ],
)
def test_errors(call, error, message):
    model = make_model()
    with pytest.raises(error, match=message):
        call(model)
    assert wrapped_names(model) == []


def test_compiled_modules():
    model = make_model(2)
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    with pytest.raises(TypeError, match=r"'layers\.1' \(OptimizedModule\) is a module compiled by"):
        wrap(model, select="layers.*")
    with pytest.raises(TypeError, match="the OptimizedModule is a module compiled by"):
        wrap(model.layers[1])
    assert wrapped_names(model) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# PyTorch 2.15 deprecates it
@pytest.mark.filterwarnings("ignore:.torch.jit.trace(_method)?. is deprecated:FutureWarning")
def test_scripted_modules():
    model = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    with pytest.raises(TypeError, match=r"'0' \(TopLevelTracedModule\) is compiled by TorchScript"):
        wrap(model, select="*")


def test_an_error_inside_leaves_nothing_behind():
    class Picky(nn.Module):
        def forward(self, x):
            if x.shape[0] == 3:
                raise KeyError("three")
            return x.sin()

    module = wrap(Picky())
    for _ in range(2):
        with pytest.raises(KeyError, match="three"):
            module(torch.ones(3))
        assert torch.equal(module(torch.ones(2)), torch.ones(2).sin())


# --- report --------------------------------------------------------------------------------------


def test_report_names_the_wrapped_modules():
    model = wrap(make_model(2), save_modules("layers.*.attn"), select="layers.*")
    step(model)
    with torch.no_grad():
        model(TOKENS)
    rows = report(model).rows
    saved = {row.module for row in rows if row.decision == "saved"}
    assert saved
    assert all(name.startswith(("layers.0.attn", "layers.1.attn")) for name in saved)


def test_report_names_the_parameters_of_a_wrapped_module_itself():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrap(model, select="1")
    model(torch.ones(3, 4)).sum().backward()
    decisions = {row.name: row.decision for row in report(model)}
    assert decisions["1.weight"] == "parameter"


def test_report_before_a_step():
    model = make_model(2)
    with pytest.raises(NoMatchError, match="nothing in Model is wrapped"):
        report(model)
    wrap(model, select="layers.*")
    with pytest.raises(RuntimeError, match=r"none of the 2 wrapped modules \(layers\.0, layers\.1"):
        report(model)
    with torch.no_grad():
        model(TOKENS)
    with pytest.raises(RuntimeError, match="run a step, then ask"):
        report(model)


def test_report_of_a_wrapped_module_inside_another():
    model = wrap(wrap(make_model(2), "dots", select="**.attn"), select="layers.0")
    step(model)
    names = {row.module for row in report(model).rows}
    assert any(name.startswith("layers.0") for name in names)
    assert any(name.startswith("layers.1.attn") for name in names)
    assert not any(name.startswith("layers.1.mlp") for name in names)


def test_forward_is_told_apart_from_a_patch():
    block = wrap(Block(0.0))
    assert isinstance(vars(block)["forward"], RematForward)
    block.forward = block.forward.__wrapped__
    assert remat_forward_of(block) is None
