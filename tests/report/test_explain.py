import copy
import functools
import pickle
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

import torchremat as tr
import torchremat.nn
from tests.helpers import OpCounter, one_in
from torchremat.measure import HeldBytes
from torchremat.report.explain import report_of_programs

policies = tr.checkpoint_policies


def rows_of(report, *decisions):
    return [(row.name, row.decision) for row in report if row.decision in decisions]


def names_of(report, decision):
    return [row.name for row in report if row.decision == decision]


# --- the total is what autograd really holds ------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        hidden = tr.checkpoint_name(F.gelu(self.a(x)), "hidden")
        return self.norm(x + F.dropout(self.b(hidden), 0.1, self.training)).softmax(-1)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x)), inplace=True), 2)
        x = F.silu(tr.checkpoint_name(self.norm2(self.conv2(x)), "hidden"))
        return x.mean((2, 3)).log_softmax(-1)


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)

    def forward(self, x):
        h = c = torch.zeros(x.shape[1], 5)
        outputs = []
        for step in x:
            h, c = self.cell(step, (h, c))
            outputs.append(tr.checkpoint_name(h, "hidden"))
        return torch.stack(outputs), c


def attention(q, k, v):
    return tr.checkpoint_name(F.scaled_dot_product_attention(q, k, v, is_causal=True), "hidden")


def views(x, w, index):
    """Views, expansion, writes in place, integer indices, a constant, several outputs."""
    y = (x.expand(4, -1, -1) * 2.0).transpose(1, 2)[..., ::2].contiguous()
    y.mul_(3)
    y = tr.checkpoint_name(y[index].sin_(), "hidden")
    z = torch.zeros_like(y)
    z[0] = y[0]
    z[1:] = y[1:] * y[1:]
    z = torch.where(z > 0.1, z, torch.tensor(0.5))
    values, places = z.cumsum(0).topk(2, dim=-1)
    return values.flatten(1) @ w, places, z.view(-1)


def losses(x, target):
    scores = tr.checkpoint_name(x.log_softmax(-1) * x.var(), "hidden")
    return F.cross_entropy(scores, target) + F.mse_loss(x, x.detach())


def inner_checkpoints(x, w):
    first = tr.checkpoint(lambda x: (x @ w).sin().sin(), policy="dots")
    second = tr.checkpoint(lambda x: tr.checkpoint_name(x.exp(), "hidden").sin())
    y = second(torch.tanh(first(x)))
    return (y * y).sum(), y


def randn(*shape):
    return torch.randn(*shape, requires_grad=True)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def causal_mask():
    """Given as it is used. Without one transformers 5 makes one in a trace only, not in a run."""
    return torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()


def tokens(**more):
    ids = torch.arange(16).view(2, 8)
    return (ids,), {"labels": ids, "use_cache": False, **more}


CASES = {
    "mlp": lambda: (Mlp(), (randn(3, 8),), {}),
    "mlp-eval": lambda: (Mlp().eval(), (torch.randn(3, 8),), {}),
    "conv": lambda: (Conv(), (torch.randn(2, 3, 8, 8),), {}),
    "conv-eval": lambda: (Conv().eval(), (torch.randn(2, 3, 8, 8),), {}),
    "encoder": lambda: (
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        (randn(2, 6, 16),),
        {},
    ),
    "gpt2": lambda: (gpt2(), *tokens()),
    "llama": lambda: (llama(), *tokens(attention_mask=causal_mask())),
    "loop": lambda: (Loop(), (torch.randn(4, 2, 4),), {}),
    "embedding": lambda: (nn.Embedding(10, 8), (torch.tensor([1, 1, 3]),), {}),
    "attention": lambda: (attention, (randn(2, 2, 5, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 8)), {}),
    "views": lambda: (views, (randn(3, 6), randn(12, 2), torch.tensor([2, 0, 1])), {}),
    "losses": lambda: (losses, (randn(4, 5), torch.tensor([1, 2, 3, 0])), {}),
    "inner": lambda: (inner_checkpoints, (randn(3, 3), randn(3, 3)), {}),
    "frozen": lambda: (F.linear, (torch.randn(3, 4), torch.randn(5, 4), randn(5)), {}),
    "complex": lambda: (
        lambda x: (torch.fft.fft(x).abs() ** 2).sum(),
        (randn(6),),
        {},
    ),
}


@pytest.mark.parametrize(
    ("case", "policy"), one_in(3, CASES, [None, "full", "none", "dots", "names:hidden"])
)
@pytest.mark.filterwarnings("ignore::torchremat.UnmatchedWarning")
@pytest.mark.sampled(3)
def test_total_is_what_autograd_holds(case, policy):
    torch.manual_seed(0)
    f, args, kwargs = CASES[case]()
    report = tr.explain(f, *args, policy=policy, **kwargs)
    run = f if policy is None else tr.checkpoint(f, policy=policy)
    with HeldBytes(f, args, kwargs) as held:
        outputs = run(*args, **kwargs)
    assert report.total == held.total
    assert sum(r.nbytes for r in report if r.decision in ("saved", "constant")) == held.total
    assert sorted(t.nbytes for t in held.tensors) == sorted(
        row.nbytes for row in report if row.decision in ("saved", "constant")
    )
    del outputs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::torchremat.UnmatchedWarning")
@pytest.mark.sampled(3)
def test_residuals_are_the_rows_that_are_held(case):
    torch.manual_seed(0)
    f, args, kwargs = CASES[case]()
    f = tr.checkpoint(f, policy="dots")
    residuals = tr.saved_residuals(f, *args, **kwargs)
    report = tr.explain(f, *args, **kwargs)
    rows = [row for row in report if row.decision != "recomputed"]
    assert sorted((str(r.aval), r.nbytes) for r in residuals) == sorted(
        (row.aval, row.nbytes) for row in rows
    )


# --- on the meta device ---------------------------------------------------------------------------


def on_meta(tree):
    """The same with each tensor on the meta device, however often it is there."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    for model in tree_leaves(tree):
        tensors += [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    moved = {}
    for tensor in tensors:
        meta = tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
        is_parameter = isinstance(tensor, nn.Parameter)
        moved[id(tensor)] = nn.Parameter(meta, meta.requires_grad) if is_parameter else meta
    return copy.deepcopy(tree, moved)


@pytest.mark.parametrize("policy", [None, "dots"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::torchremat.UnmatchedWarning")
@pytest.mark.sampled(3)
def test_a_report_on_the_meta_device_is_that_on_the_cpu(case, policy):
    call = CASES[case]()
    on_cpu, report = (
        tr.explain(f, *args, policy=policy, **kwargs) for f, args, kwargs in (call, on_meta(call))
    )
    assert str(report) == str(on_cpu)
    assert report.rows == on_cpu.rows


class Att(nn.Module):
    """It asks for its device in three ways."""

    def __init__(self, device=None):
        super().__init__()
        self.qkv, self.device = nn.Linear(8, 24, device=device), torch.device(device or "cpu")

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(6, 6, dtype=torch.bool, device=self.qkv.weight.device).tril()
        mask = mask & torch.ones(6, dtype=torch.bool, device=self.device).to(x.device)
        return F.scaled_dot_product_attention(q, k, v, mask)


def called(model):
    """Ways to call a model with an argument."""
    step = functools.partial(lambda model, x: model(x).sum(), model)
    return {
        "itself": model,
        "closed over": lambda x: model(x).sum(),
        "in a partial": step,
        "a method": model.forward,
        "a checkpoint": tr.checkpoint(model, policy="dots"),
        "wrapped": torchremat.nn.wrap(copy.deepcopy(model), "dots"),
    }


@pytest.mark.parametrize("way", called(nn.Linear(1, 1)))
@pytest.mark.sampled(2)
def test_a_model_on_the_meta_device_is_traced_as_on_the_cpu_however_it_is_called(way):
    on_cpu = called(Att())[way], torch.ones(2, 6, 8)
    meta = called(Att("meta"))[way], torch.ones(2, 6, 8, device="meta")
    assert tr.explain(*meta).rows == tr.explain(*on_cpu).rows
    assert list(map(str, tr.saved_residuals(*meta))) == list(map(str, tr.saved_residuals(*on_cpu)))
    assert tr.estimate(*meta, device="cpu") == tr.estimate(*on_cpu, device="cpu")
    assert meta[0](meta[1]).is_meta  # what was traced so does not serve a call


def test_what_a_function_makes_by_itself_goes_where_its_arguments_are():
    def f(x):
        return (x * torch.rand(3)).exp()

    with torch.device("meta"):
        report = tr.explain(f, torch.ones(3))
    assert report.rows == tr.explain(f, torch.ones(3)).rows


# --- the same for whole models under every policy -------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        x = F.gelu(tr.checkpoint_name(self.norm2(self.conv2(x)), "hidden"))
        return self.head(self.drop(F.max_pool2d(x, 2).mean((2, 3))))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = kind(6, 5, num_layers=2, dropout=0.2), nn.Linear(5, 3)

    def forward(self, x):
        hidden, _ = self.rnn(x)
        return self.head(tr.checkpoint_name(F.gelu(hidden), "hidden"))


class Experts(nn.Module):
    """Each token goes to the two experts of four that its router prefers."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)
        )

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        gates = torch.zeros(x.shape[0], 4).scatter(1, chosen, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return x + (tr.checkpoint_name(outputs, "hidden") * gates.unsqueeze(-1)).sum(1)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.body = Mlp()
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.body(self.embed(tokens))), tokens)


MODELS = {
    "mlp": lambda: (Mlp(), (torch.randn(3, 8),), {}),
    "convnet": lambda: (ConvNet(), (torch.randn(2, 3, 8, 8),), {}),
    "encoder": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu"), 2
        ),
        (torch.randn(2, 6, 16),),
        {},
    ),
    "gpt2": lambda: (gpt2(), *tokens()),
    "lstm": lambda: (Recurrent(nn.LSTM), (torch.randn(4, 2, 6),), {}),
    "gru": lambda: (Recurrent(nn.GRU), (torch.randn(4, 2, 6),), {}),
    "experts": lambda: (Experts(), (torch.randn(5, 8),), {}),
    "tied": lambda: (Tied(), (torch.tensor([1, 5, 5, 0]),), {}),
}


def save_what_is_added(ctx, op, *args, **kwargs):
    return op is torch.ops.aten.add.Tensor


DOTS, HIDDEN = policies.dots_saveable, policies.save_only_these_names("hidden")
EVERY_POLICY = [
    None,
    "none",
    "full",
    "dots",
    policies.dots_with_no_batch_dims_saveable,
    HIDDEN,
    policies.save_anything_except_these_names("hidden"),
    policies.save_any_names_but_these("other"),
    policies.save_from_both_policies(DOTS, HIDDEN),
    policies.save_ops("aten.gelu", "aten.native_layer_norm"),
    policies.recompute_ops("aten.gelu", "aten.mm"),
    policies.save_modules("*1*", "rnn"),
    policies.recompute_modules("*1*", "rnn"),
    policies.from_selective(save_what_is_added),
    DOTS | policies.save_ops("aten.gelu"),
    DOTS & policies.recompute_modules("*1*"),
    ~DOTS,
]


class Box:
    """What autograd is given in place of a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()


def bytes_in_autograd(run, state, args, kwargs, *, workspaces=True):
    """What `saved_tensors_hooks` sees of a real run: living storages by their address.

    Without `workspaces` not what the kernel of an LSTM keeps, of which a graph knows nothing.
    """
    boxes = weakref.WeakSet()

    def pack(tensor):
        box = Box(tensor)
        boxes.add(box)
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        outputs = run(*args, **kwargs)
    found = {}
    for box in boxes:
        if not workspaces and box.tensor.dtype == torch.uint8 and box.tensor.dim() == 1:
            continue
        storage = box.tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    given = [*state, *tree_leaves((args, kwargs))]
    for tensor in given:
        if isinstance(tensor, torch.Tensor):
            found.pop(tensor.untyped_storage().data_ptr(), None)
    del outputs
    return sum(found.values())


def test_the_count_of_what_autograd_holds():
    x, w = randn(2, 3), randn(3, 4)

    def f(x):
        y = x @ w
        y.exp().sin()  # let go of at once
        return (y.view(-1) * y.T.reshape(-1)).sum() + y[0].sin().sum()

    # y once though three views of it are kept, the copy that reshape makes, x and w apart
    assert bytes_in_autograd(f, [w], (x,), {}) == 2 * 32
    assert bytes_in_autograd(f, [], (x,), {}) == 2 * 32 + 48


@pytest.mark.parametrize(("model", "policy"), one_in(3, MODELS, EVERY_POLICY))
@pytest.mark.filterwarnings("ignore::torchremat.UnmatchedWarning")
@pytest.mark.sampled(3)
def test_total_of_a_model_under_a_policy(model, policy):
    torch.manual_seed(0)
    module, args, kwargs = MODELS[model]()
    state = [*module.parameters(), *module.buffers()]
    report = tr.explain(module, *args, policy=policy, **kwargs)
    run = module if policy is None else tr.checkpoint(module, policy=policy)
    held = bytes_in_autograd(run, state, args, kwargs, workspaces=policy is None)
    assert report.total == held
    assert sum(report.by_module().values()) == report.total
    assert {row.name for row in report if row.decision == "parameter"} <= {
        name for name, _ in module.named_parameters()
    }


def test_a_workspace_that_a_trace_does_not_know():
    module, (x,), _ = MODELS["lstm"]()
    report = tr.explain(module, x)
    workspaces = [row for row in report if row.dtype == torch.uint8 and row.nbytes > 4 * 2 * 5]
    assert [row.name for row in workspaces] == ["rnn.mkldnn_rnn_layer_3", "rnn.mkldnn_rnn_layer_7"]
    assert all(row.shape == (row.nbytes,) for row in workspaces)
    with FakeTensorMode():
        fake = torch.randn(4, 2, 6)
    left_out = tr.explain(module, fake)  # nothing runs
    assert report.total - left_out.total == sum(row.nbytes for row in workspaces)


# --- decisions and reasons ------------------------------------------------------------------------


def two_layers(x, w):
    y = torch.sin(x @ w)
    return torch.sin(y @ w)


def arguments():
    return torch.ones(2, 3), torch.ones(3, 3)


def test_plain():
    report = tr.explain(two_layers, *arguments())
    assert rows_of(report, "saved", "recomputed", "input") == [
        ("x", "input"),
        ("w", "input"),
        ("mm", "saved"),
        ("sin", "saved"),
        ("mm_1", "saved"),
    ]
    row = next(row for row in report if row.name == "sin")
    assert row.reason == "no checkpoint decides: MmBackward0 reads it"
    assert (row.op, row.module, row.shape, row.dtype) == ("sin", "", (2, 3), torch.float32)
    line = two_layers.__code__.co_firstlineno + 1
    assert str(row.source) == f"test_explain.py:{line} (two_layers)"
    assert report.rows[0].reason == "an argument"
    assert report.total == 3 * 24


def test_policies_decide():
    report = tr.explain(two_layers, *arguments(), policy=policies.dots_saveable)
    assert rows_of(report, "saved", "recomputed") == [
        ("mm", "saved"),
        ("sin", "recomputed"),
        ("mm_1", "saved"),
    ]
    reasons = {row.name: row.reason for row in report}
    assert reasons["mm"].startswith("dots")
    assert reasons["sin"].startswith("dots")
    assert reasons["sin"].endswith("does not let it be saved")


def test_a_policy_is_as_a_checkpoint():
    inside = tr.explain(tr.checkpoint(two_layers, policy="dots"), *arguments())
    assert inside == tr.explain(two_layers, *arguments(), policy="dots")


def test_what_must_not_be_replayed_says_why():
    report = tr.explain(lambda x: F.dropout(x, 0.5).sin().sin(), torch.ones(9), policy="full")
    (row,) = [row for row in report if row.decision == "saved"]
    assert "draws random numbers" in row.reason


def test_inputs_of_checkpoints():
    @tr.checkpoint
    def block(x):
        return x.sin().sin()

    def f(x):
        return block(block(x.exp() + 1))

    report = tr.explain(f, torch.ones(3))
    assert [(r.name, r.decision, r.reason.rpartition(".")[2]) for r in report] == [
        ("exp", "saved", "no checkpoint decides: ExpBackward0 reads it"),
        ("add", "saved", "block reads it"),
        ("sin", "recomputed", "full does not let it be saved"),
        ("sin_1", "saved", "block reads it"),
        ("sin_2", "recomputed", "full does not let it be saved"),
    ]
    assert report.rows[1].reason.startswith("an input of a checkpoint: test_inputs_of_checkpoints")


def test_constants_parameters_and_buffers():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x):
            return x * self.weight * self.scale * torch.tensor([1.0, 2.0, 3.0])

    report = tr.explain(Scaled(), torch.ones(3))
    assert [(r.name, r.decision, r.reason) for r in report if not r.op] == [
        ("x", "input", "an argument"),
        ("scale", "input", "a buffer"),
    ]
    report = tr.explain(Scaled(), torch.ones(3, requires_grad=True))
    assert names_of(report, "parameter") == ["weight"]
    (constant,) = [row for row in report if row.decision == "constant"]
    assert constant.nbytes == 12
    assert report.total == 12 + 12 * 0  # nothing but the constant: x * weight needs no result


def test_closed_over_tensors_are_inputs():
    w = torch.ones(3, requires_grad=True)
    scale = nn.Parameter(torch.ones(3))

    def f(x):
        return (x * w).sin() * scale

    report = tr.explain(f, torch.ones(3, requires_grad=True))
    inputs = [(r.name, r.decision) for r in report if not r.op]
    assert inputs == [("x", "input"), ("w", "input"), ("scale", "input")]


def deep(x, w):
    for _ in range(3):
        x = torch.tanh(torch.sin(x @ w).exp() @ w.t())
    return x.sum()


def deep_in_parts(x, w):
    part = tr.checkpoint(lambda x: torch.tanh(torch.sin(x @ w).exp() @ w.t()), policy="dots")
    return part(part(part(x))).sum()


@pytest.mark.parametrize("policy", ["none", "full", "dots", policies.save_ops("aten.sin")])
@pytest.mark.parametrize("f", [deep, deep_in_parts])
def test_recomputed_rows_are_the_operators_that_run_again(f, policy):
    x, w = (t.requires_grad_() for t in arguments())

    def backward_operators(f):
        f(x, w)
        loss = f(x, w)
        with OpCounter() as operators:
            torch.autograd.grad(loss, [x, w])
        return operators

    plain = backward_operators(deep)
    counts = backward_operators(tr.checkpoint(f, policy=policy))
    again = {name: counts[name] - plain[name] for name in ("mm", "sin", "exp", "tanh")}
    report = tr.explain(f, x, w, policy=policy)
    rows = Counter(row.op for row in report if row.decision == "recomputed")
    if f is deep:
        assert again == {name: rows[name] for name in again}
    else:  # a value may be computed twice: once for what follows, once for the backward of the part
        assert all((again[name] > 0) == (rows[name] > 0) for name in again)
        assert all(again[name] >= rows[name] for name in again)


def test_verified_programs_hold_more(monkeypatch):
    x, w = (t.requires_grad_() for t in arguments())
    monkeypatch.setattr(tr.config, "verify_recomputation", "bitwise")
    report = tr.explain(two_layers, x, w, policy="dots")
    f = tr.checkpoint(two_layers, policy="dots")
    with HeldBytes(x, w) as held:
        output = f(x, w)
    assert report.total == held.total == 72
    assert "config.verify_recomputation compares it" in {row.reason for row in report}
    del output


# --- names ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = tr.checkpoint_name((q @ k.mT).softmax(-1), "scores")
        return self.out(scores @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm = Attention(), nn.LayerNorm(8)

    def forward(self, x):
        return x + torch.tanh(self.attn(self.norm(x)))


class Model(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def batch():
    return torch.ones(2, 4, 8)


def test_names_are_module_and_operator():
    report = tr.explain(Model(1), batch())
    assert names_of(report, "saved") == [
        "layers.0.norm.native_layer_norm",
        "layers.0.norm.native_layer_norm_1",
        "layers.0.norm.native_layer_norm_2",
        "layers.0.attn.qkv.mm",
        "scores",
        "layers.0.attn.bmm_1",
        "layers.0.tanh",
    ]
    scores = next(row for row in report if row.name == "scores")
    assert (scores.module, scores.op) == ("layers.0.attn", "_softmax")
    assert set(names_of(report, "parameter")) == {
        "layers.0.norm.weight",
        "layers.0.norm.bias",
        "layers.0.attn.qkv.weight",
        "layers.0.attn.out.weight",
    }


@pytest.mark.parametrize("policy", ["none", "full", "dots", "names:scores"])
def test_a_value_has_one_name_under_all_policies(policy):
    plain = tr.explain(Model(2), batch())
    other = tr.explain(Model(2), batch(), policy=policy)
    known = {(r.module, r.name): (r.op, r.shape, r.source) for r in plain}
    found = {(r.module, r.name): (r.op, r.shape, r.source) for r in other}
    assert known.items() <= found.items()


def test_writing_in_place_does_not_change_names():
    def f(x):
        y = x.mul(2)
        y = y.add_(1).relu_()
        return y.exp().relu()

    plain, full = tr.explain(f, torch.ones(3)), tr.explain(f, torch.ones(3), policy="full")
    assert names_of(plain, "saved") == ["relu", "exp", "relu_1"]
    assert set(names_of(plain, "saved")) <= set(names_of(full, "recomputed"))


def test_names_inside_wrapped_modules_are_not_doubled():
    model, plain = Model(), Model()
    expected = {(row.module, row.name) for row in tr.explain(plain, batch())}
    tr.nn.wrap(model, "names:scores", select="layers.*")
    report = tr.explain(model, batch())
    assert expected <= {(row.module, row.name) for row in report}
    saved = [row for row in report if row.name == "scores"]
    assert [(row.module, row.decision) for row in saved] == [
        (f"layers.{i}.attn", "saved") for i in range(3)
    ]
    holder = [model]

    def f(x):
        return holder[0](x)

    modules = {row.module for row in tr.explain(f, batch()) if row.op}
    assert "holder[0].layers.1.attn" in modules
    assert all(module.startswith("holder[0].layers.") for module in modules)


def test_names_inside_checkpoints_in_a_module():
    class Outer(Block):
        def forward(self, x):
            return x + tr.checkpoint(lambda x: torch.tanh(self.attn(self.norm(x))))(x)

    class Outers(Model):
        def __init__(self):
            nn.Module.__init__(self)
            self.layers = nn.ModuleList(Outer() for _ in range(2))

    report = tr.explain(Outers(), batch())
    again = names_of(report, "recomputed")
    assert "layers.1.attn.qkv.mm" in again
    assert "layers.1.tanh" in again
    scores = [(row.module, row.decision) for row in report if row.name == "scores"]
    assert scores == [("layers.0.attn", "recomputed"), ("layers.1.attn", "recomputed")]

    report = tr.explain(Outers(), batch(), policy="names:scores")
    scores = [(row.module, row.decision) for row in report if row.name == "scores"]
    assert scores == [("layers.0.attn", "saved"), ("layers.1.attn", "saved")]
    again = names_of(report, "recomputed")
    assert {"layers.0.attn.qkv.mm", "layers.1.attn.qkv.mm", "layers.1.tanh"} <= set(again)
    assert not {"layers.0.attn.bmm", "layers.1.attn.bmm"} & set(again)  # scores is computed of it


def test_checkpoints_within_checkpoints():
    inner = tr.checkpoint(lambda x: x.sin().sin().sin())

    def f(x):
        return inner(inner(x.exp()).exp())

    x = torch.ones(3)
    report = tr.explain(f, x, policy="full")
    assert report.total == 0
    names = names_of(report, "recomputed")
    assert len(names) == len(set(names))
    assert {"exp", "sin", "sin_1", "exp_1", "sin_3", "sin_4"} <= set(names)

    report = tr.explain(f, x, policy=policies.save_ops("aten.exp"))
    assert rows_of(report, "saved") == [("exp", "saved"), ("exp_1", "saved")]
    report = tr.explain(f, x, policy=policies.save_ops("aten.sin"))
    assert set(names_of(report, "saved")) <= {"sin", "sin_1", "sin_2", "sin_3", "sin_4"}


# --- texts ----------------------------------------------------------------------------------------


def test_layers_are_folded_in_text():
    text = str(tr.explain(Model(12), batch(), policy="names:scores"))
    assert "x12  layers.0-11.attn.'scores'" in text
    assert "layers.0-11.attn.qkv.weight" in text
    assert max(map(len, text.splitlines())) <= 100


def test_diff_of_policies():
    f, args = two_layers, arguments()
    diff = tr.explain(f, *args).diff(tr.explain(f, *args, policy="dots"))
    assert [(c.row.name, c.before, c.after) for c in diff] == [("sin", "saved", "recomputed")]
    assert (diff.total_before, diff.total_after) == (72, 48)


def test_reports_can_be_pickled():
    report = tr.explain(two_layers, *arguments(), policy="dots")
    assert pickle.loads(pickle.dumps(report)) == report


# --- programs that have run -----------------------------------------------------------------------


def test_report_of_programs():
    model = Model(2)
    tr.nn.wrap(model, "names:scores", select="layers.*")
    explained = tr.explain(model, batch())
    model(batch())
    report = tr.nn.report(model)
    kept = {(r.module, r.name, r.nbytes, r.reason) for r in report if r.decision == "saved"}
    assert kept == {(f"layers.{i}.attn", "scores", 128, "names:scores") for i in range(2)}
    assert names_of(report, "recomputed") == names_of(explained, "recomputed")
    assert names_of(report, "parameter") == names_of(explained, "parameter")
    assert names_of(report, "input") == ["layers.0.arg0", "layers.1.arg0"]
    assert report_of_programs([], {}).rows == ()


@pytest.mark.parametrize("policy", ["full", "dots", "none", "names:hidden"])
def test_report_of_a_step_is_what_autograd_held(policy):
    model, x = Mlp(), torch.randn(3, 8)
    tr.nn.wrap(model, policy)
    with HeldBytes(model, x) as held:
        loss = model(x).sum()
    loss.backward()
    assert tr.nn.report(model).total == held.total == tr.explain(model, x).total


# --- nothing is disturbed; bad input --------------------------------------------------------------


def test_nothing_runs():
    model = Conv()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    tr.explain(model, torch.ones(2, 3, 8, 8), policy="dots")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())


def test_a_real_run_after_it_is_as_without():
    f = tr.checkpoint(two_layers, policy="dots")
    x, w = (t.requires_grad_() for t in arguments())
    tr.explain(f, x, w)
    f(x, w).sum().backward()
    grads = [x.grad, w.grad]
    expected = torch.autograd.grad(two_layers(x, w).sum(), [x, w])
    assert all(map(torch.equal, grads, expected))


def test_unmatched_names_are_warned_of():
    with pytest.warns(tr.UnmatchedWarning, match="hiden"):
        tr.explain(Mlp(), torch.ones(2, 8), policy="names:hiden")


def test_bad_input():
    with pytest.raises(TypeError, match=r"function of tensors or an nn\.Module"):
        tr.explain(torch.ones(3))
    with pytest.raises(TypeError, match=r"function of tensors or an nn\.Module"):
        tr.explain(None, torch.ones(3), policy="dots")
    with pytest.raises(TypeError, match="nothing to differentiate"):
        tr.explain(torch.sin, torch.tensor(3), policy="dots")
    with pytest.raises(TypeError, match="unknown policy"):
        tr.explain(torch.sin, torch.ones(3), policy=3)
    with pytest.raises(ValueError, match="dots"):
        tr.explain(torch.sin, torch.ones(3), policy="dotz")


def test_partials_of_explain():
    explain = functools.partial(tr.explain, two_layers, policy="dots")
    assert explain(*arguments()).total == 48


def test_a_plan_that_draws_random_numbers_again_is_explained():
    def f(x, w):
        for _ in range(3):
            x = F.dropout(torch.tanh(x @ w), 0.5)
        return x.sum()

    x, w = torch.ones(256, 64, requires_grad=True), torch.eye(64, requires_grad=True)
    report = tr.explain(f, x, w, policy="budget:56%")
    again = names_of(report, "recomputed")
    assert set(again) <= {"mm", "tanh", "div", "mul", "mul_1", "mul_2"}
    assert "div" in again  # of numbers that are drawn again, of which the state is kept
    run = tr.checkpoint(f, policy="budget:56%")
    with HeldBytes(x, w) as held:
        loss = run(x, w)
    assert report.total == held.total
    loss.backward()
