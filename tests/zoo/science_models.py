"""Graph networks, flows, differential equations, Gaussian processes, medical images, operators."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.zoo_model import Arguments, ZooModel

_NODES, _EDGES, _FEATURES = 400, 1600, 8


def find_science_models() -> dict[str, ZooModel]:
    found: dict[str, ZooModel] = {}
    for name in ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"):
        found[f"torch_geometric, {name}"] = ZooModel(
            "torch_geometric", functools.partial(_build_graph_network, name), _graph
        )
    found["torch_geometric, SchNet"] = ZooModel("torch_geometric", _build_schnet, _molecules)
    found["e3nn, gated convolutions"] = ZooModel("e3nn", _Equivariant, _points)
    for name, build in _MONAI.items():
        found[f"monai, {name}"] = ZooModel("monai", build, lambda: (torch.randn(1, 1, 32, 32, 32),))
    for method in ("rk4", "dopri5"):
        build = functools.partial(_NeuralODE, method)
        found[f"torchdiffeq, {method}"] = ZooModel("torchdiffeq", build, _rows)
    for name in ("MAF", "NSF", "NICE", "CNF", "NAF"):
        found[f"zuko, {name}"] = ZooModel("zuko", functools.partial(_Flow, name), _few_rows)
    found["gpytorch, exact GP"] = ZooModel("gpytorch", _GaussianProcess, _rows)
    found["neuralop, FNO"] = ZooModel("neuralop", _build_fno, lambda: (torch.randn(2, 1, 16, 16),))
    found["neuralop, UNO"] = ZooModel("neuralop", _build_uno, lambda: (torch.randn(2, 1, 16, 16),))
    for name, settings in _X_TRANSFORMERS.items():
        build = functools.partial(_XTransformer, settings)
        found[f"x_transformers, {name}"] = ZooModel("x_transformers", build, _tokens)
    return found


# --- batches -------------------------------------------------------------------------------------


def _rows() -> Arguments:
    return (torch.randn(16, 4),)


def _few_rows() -> Arguments:
    return (torch.randn(16, 3),)


def _tokens() -> Arguments:
    return (torch.randint(0, 64, (4, 16)),)


def _graph() -> Arguments:
    return torch.randn(_NODES, _FEATURES), torch.randint(0, _NODES, (2, _EDGES))


def _molecules() -> Arguments:
    batch = torch.arange(2).repeat_interleave(6)
    return torch.randint(1, 9, (12,)), torch.randn(12, 3) * 2, batch


def _points() -> Arguments:
    return torch.randn(200, 3), torch.randn(200, 4)


# --- models --------------------------------------------------------------------------------------


def _build_graph_network(name: str) -> nn.Module:
    kind = getattr(importlib.import_module("torch_geometric.nn"), name)
    extra = {}
    if name == "PNA":
        degrees = torch.tensor([0, 4, 8, 8, 4])
        extra = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": degrees}
    return kind(_FEATURES, 16, num_layers=3, out_channels=4, dropout=0.1, **extra)


def _build_schnet() -> nn.Module:
    kind = importlib.import_module("torch_geometric.nn").SchNet
    graph = _AllPairs()
    return kind(
        hidden_channels=16,
        num_filters=16,
        num_interactions=2,
        num_gaussians=8,
        interaction_graph=graph,
    )


class _AllPairs(nn.Module):
    """The edges within each molecule; the library's own need a compiled extension."""

    def forward(self, positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pairs = batch[:, None] == batch[None, :]
        pairs.fill_diagonal_(False)
        edges = pairs.nonzero().t()
        return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)


class _Equivariant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        o3 = importlib.import_module("e3nn.o3")
        self._harmonics = o3.spherical_harmonics
        self.products = nn.ModuleList(
            [
                o3.FullyConnectedTensorProduct(a, "1x0e+1x1o+1x2e", b)
                for a, b in (("4x0e", "8x0e+4x1o"), ("8x0e+4x1o", "4x0e"))
            ]
        )

    def forward(self, positions: Tensor, features: Tensor) -> Tensor:
        harmonics = self._harmonics([0, 1, 2], positions, normalize=True)
        for product in self.products:
            features = product(features, harmonics)
        return features


def _monai(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(importlib.import_module("monai.networks.nets"), name)(**settings)

    return build


_VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_MONAI = {
    "UNet": _monai("UNet", **_VOLUME, channels=(4, 8, 16), strides=(2, 2), num_res_units=1),
    "SegResNet": _monai("SegResNet", **_VOLUME, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
    "AttentionUnet": _monai("AttentionUnet", **_VOLUME, channels=(4, 8), strides=(2,)),
    "UNETR": _monai(
        "UNETR",
        in_channels=1,
        out_channels=2,
        img_size=32,
        hidden_size=32,
        mlp_dim=64,
        num_heads=2,
        feature_size=4,
    ),
    "DynUNet": _monai(
        "DynUNet",
        **_VOLUME,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 16],
    ),
    "VNet": _monai("VNet", **_VOLUME),
}


class _NeuralODE(nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.field = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, state: Tensor) -> Tensor:
        solve = importlib.import_module("torchdiffeq").odeint
        times = torch.linspace(0.0, 1.0, 3)
        states = solve(lambda _, y: self.field(y), state, times, method=self.method)
        return self.head(states[-1])


class _Flow(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        kind = getattr(importlib.import_module("zuko.flows"), name)
        extra = {} if name == "CNF" else {"transforms": 2}
        self.flow = kind(3, 0, hidden_features=(16, 16), **extra)

    def forward(self, rows: Tensor) -> Tensor:
        return -self.flow().log_prob(rows)


class _GaussianProcess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        gpytorch = importlib.import_module("gpytorch")
        self.embedding = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.mean = gpytorch.means.ConstantMean()
        self._normal = gpytorch.distributions.MultivariateNormal

    def forward(self, rows: Tensor) -> Tensor:
        inputs = self.embedding(rows)
        covariance = self.kernel(inputs).add_jitter(0.1)
        return -self._normal(self.mean(inputs), covariance).log_prob(rows.sum(1))


def _build_fno() -> nn.Module:
    kind = importlib.import_module("neuralop.models").FNO
    return kind(n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)


def _build_uno() -> nn.Module:
    kind = importlib.import_module("neuralop.models").UNO
    return kind(
        in_channels=1,
        out_channels=1,
        hidden_channels=8,
        n_layers=3,
        uno_out_channels=[8, 8, 8],
        uno_n_modes=[[4, 4]] * 3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
        channel_mlp_skip="linear",
    )


_DEPTH = {"dim": 32, "depth": 2, "heads": 2}
_X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "rotary positions": {"rotary_pos_emb": True, "attn_dropout": 0.1, "ff_dropout": 0.1},
    "gated, normed queries": {"ff_glu": True, "attn_qk_norm": True, "use_rmsnorm": True},
    "macaron, sandwich norm": {"macaron": True, "sandwich_norm": True},
    "layers dropped": {"layer_dropout": 0.3},
    "memory of keys": {"attn_num_mem_kv": 4, "attn_pre_talking_heads": True},
}


class _XTransformer(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        library = importlib.import_module("x_transformers")
        layers = library.Decoder(**_DEPTH, **settings)
        self.model = library.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)
