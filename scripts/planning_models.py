"""The models of `bench_planning.py`: plain PyTorch on the meta device, each giving a scalar loss.

No dropout, so that nothing is random. A model is named by its kind and its depth: `gpt-4`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """A model to plan.

    Attributes:
        build: makes the module, which returns its loss, and its arguments.
        blocks: names of submodules, as patterns, that `torch.utils.checkpoint` is put on.
        quick: whether it is among those of `--quick`.
        oracle: whether Checkmate's program is solved for it.
        large: whether peers that take minutes are left out.
    """

    build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    blocks: tuple[str, ...]
    quick: bool = False
    oracle: bool = False
    large: bool = False


def heads_of(x: Tensor, num_heads: int) -> Tensor:
    """(b, t, d) to (b, h, t, d / h)."""
    b, t, d = x.shape
    return x.view(b, t, num_heads, d // num_heads).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Softmax(q k^T / sqrt(d)) v over (b, h, t, d), to (b, t, h d), written out."""
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    if causal:
        t = scores.shape[-1]
        allowed = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -1e9)
    mixed = scores.softmax(-1) @ v
    b, h, t, d = mixed.shape
    return mixed.transpose(1, 2).reshape(b, t, h * d)


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(y, self.num_heads) for y in self.qkv(x).chunk(3, -1))
        return self.out(attention(q, k, v, causal=self.causal))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A layer of GPT or ViT; `mlp` may be a mixture of experts."""

    def __init__(
        self, width: int, num_heads: int, *, causal: bool, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, causal=causal)
        self.mlp = mlp or Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, layers: list[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class DenseExperts(nn.Module):
    """Every expert runs on every token; the gate weighs them."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(Mlp(width, 2 * width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class LlamaLayer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        inner = 8 * width // 3 // 64 * 64
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (heads_of(f(y), self.num_heads) for f in (self.q, self.k, self.v))
        x = x + self.o(attention(rotate(q, cos, sin), rotate(k, cos, sin), v, causal=True))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, depth: int, width: int, num_heads: int, length: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, num_heads) for _ in range(depth))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("cos", torch.ones(length, width // num_heads))
        self.register_buffer("sin", torch.ones(length, width // num_heads))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Vit(nn.Module):
    def __init__(self, depth: int, width: int, num_heads: int, size: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.layers = nn.ModuleList(Block(width, num_heads, causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class MixerLayer(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = Mlp(length, width // 2), Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, depth: int, width: int, size: int, patch: int) -> None:
        super().__init__()
        length = (size // patch) ** 2
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.layers = nn.ModuleList(MixerLayer(length, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class Residual(nn.Module):
    """A basic or a bottleneck block of ResNet."""

    def __init__(self, before: int, after: int, stride: int, inner: int | None = None) -> None:
        super().__init__()
        if inner is None:
            convolutions = [(before, after, 3, stride), (after, after, 3, 1)]
        else:
            convolutions = [(before, inner, 1, 1), (inner, inner, 3, stride), (inner, after, 1, 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, k, stride=s, padding=k // 2, bias=False) for a, b, k, s in convolutions
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in convolutions)
        self.shortcut = None
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(F.relu(y) if i else y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], width: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks = []
        before = width
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            after = 4 * inner if bottleneck else inner
            for i in range(depth):
                stride = 2 if i == 0 and stage else 1
                blocks.append(Residual(before, after, stride, inner if bottleneck else None))
                before = after
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Double(nn.Module):
    """Two convolutions of a U-Net."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(a, after, 3, padding=1, bias=False) for a in (before, after)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class UNet(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        pairs = [(widths[i + 1], widths[i]) for i in reversed(range(depth))]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(Double(a, b) for a, b in pairs)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        skips, x = [], images
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], 1))
        return F.cross_entropy(self.head(x), labels)


class T5Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            heads_of(f(y), self.num_heads)
            for f, y in ((self.q, x), (self.k, context), (self.v, context))
        )
        return self.o(attention(q, k, v, causal=self.causal))


class T5Layer(nn.Module):
    def __init__(self, width: int, num_heads: int, *, decodes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RmsNorm(width) for _ in range(3 if decodes else 2))
        self.own = T5Attention(width, num_heads, causal=decodes)
        self.cross = T5Attention(width, num_heads, causal=False) if decodes else None
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.own(y, y)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), context)
        return x + self.down(F.relu(self.up(self.norms[-1](x))))


class T5(nn.Module):
    def __init__(self, depth: int, width: int, num_heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder, self.decoder = (
            nn.ModuleList(T5Layer(width, num_heads, decodes=decodes) for _ in range(depth))
            for decodes in (False, True)
        )
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        context = self.embedding(source)
        for layer in self.encoder:
            context = layer(context)
        context = self.norm1(context)
        x = self.embedding(target)
        for layer in self.decoder:
            x = layer(x, context)
        return F.cross_entropy(self.head(self.norm2(x)).flatten(0, 1), target.flatten())


class Chain(nn.Module):
    """Linear layers of varying width, with an activation between."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _gpt(depth: int, width: int, batch: int, length: int):
    layers = [Block(width, width // 64, causal=True) for _ in range(depth)]
    return Gpt(layers, width, 512), (_tokens(batch, length),)


def _llama(depth: int, width: int, batch: int, length: int):
    return Llama(depth, width, width // 64, length, 1024), (_tokens(batch, length),)


def _moe(depth: int, width: int, num_experts: int, batch: int, length: int):
    layers: list[nn.Module] = [
        Block(width, width // 64, causal=True, mlp=DenseExperts(width, num_experts))
        for _ in range(depth)
    ]
    return Gpt(layers, width, 512), (_tokens(batch, length),)


def _images(batch: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)


def _vit(depth: int, width: int, batch: int, size: int, patch: int):
    return Vit(depth, width, width // 64, size, patch), _images(batch, size)


def _mixer(depth: int, width: int, batch: int, size: int, patch: int):
    return Mixer(depth, width, size, patch), _images(batch, size)


def _resnet(depths: tuple[int, ...], width: int, batch: int, size: int, bottleneck: bool = False):
    return ResNet(depths, width, bottleneck=bottleneck), _images(batch, size)


def _unet(depth: int, width: int, batch: int, size: int):
    labels = torch.zeros(batch, size, size, dtype=torch.long)
    return UNet(depth, width), (torch.zeros(batch, 3, size, size), labels)


def _t5(depth: int, width: int, batch: int, length: int):
    tokens = (_tokens(batch, length), _tokens(batch, length // 2))
    return T5(depth, width, width // 64, 1024), tokens


def _chain(widths: tuple[int, ...], batch: int):
    return Chain(widths), (torch.zeros(batch, widths[0]),)


def on_meta(function: Callable, *args: object) -> Callable:
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        with torch.device("meta"):
            return function(*args)

    return build


_LAYERS = ("layers.*",)
_UNET = ("down.*", "up.*")
_T5 = ("encoder.*", "decoder.*")

MODELS: dict[str, Model] = {
    "chain-8": Model(on_meta(_chain, (256,) * 9, 4096), _LAYERS, quick=True, oracle=True),
    "chain-12": Model(
        on_meta(_chain, (256, 512, 128, 1024, 256, 64, 512, 512, 256, 2048, 128, 256, 64), 4096),
        _LAYERS,
        oracle=True,
    ),
    "gpt-4": Model(on_meta(_gpt, 4, 256, 4, 256), _LAYERS, quick=True),
    "gpt-5": Model(on_meta(_gpt, 5, 256, 8, 256), _LAYERS, oracle=True),
    "gpt-12": Model(on_meta(_gpt, 12, 768, 8, 1024), _LAYERS),
    "llama-4": Model(on_meta(_llama, 4, 512, 4, 512), _LAYERS, quick=True),
    "llama-16": Model(on_meta(_llama, 16, 1024, 4, 2048), _LAYERS),
    "vit-4": Model(on_meta(_vit, 4, 192, 16, 128, 8), _LAYERS),
    "vit-12": Model(on_meta(_vit, 12, 384, 32, 224, 16), _LAYERS),
    "resnet-4": Model(on_meta(_resnet, (2, 2), 32, 16, 32), ("blocks.*",), quick=True, oracle=True),
    "resnet-18": Model(on_meta(_resnet, (2, 2, 2, 2), 64, 16, 64), ("blocks.*",)),
    "resnet-50": Model(on_meta(_resnet, (3, 4, 6, 3), 64, 16, 112, True), ("blocks.*",)),
    "unet-2": Model(on_meta(_unet, 2, 16, 4, 64), _UNET, quick=True, oracle=True),
    "unet-4": Model(on_meta(_unet, 4, 32, 4, 128), _UNET),
    "t5-2": Model(on_meta(_t5, 2, 256, 8, 256), _T5),
    "t5-6": Model(on_meta(_t5, 6, 512, 8, 512), _T5),
    "mixer-4": Model(on_meta(_mixer, 4, 256, 16, 128, 8), _LAYERS, quick=True),
    "mixer-12": Model(on_meta(_mixer, 12, 512, 32, 224, 16), _LAYERS),
    "moe-2": Model(on_meta(_moe, 2, 256, 4, 8, 256), _LAYERS),
    "moe-6": Model(on_meta(_moe, 6, 512, 4, 8, 512), _LAYERS),
}
