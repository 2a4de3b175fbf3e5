"""More models of `bench_planning.py`: of the sizes that people train, on the meta device."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from planning_models import Model, RmsNorm
from torch import Tensor, nn

from tests.planning.llama import Loss


def _llama(num_layers: int, width: int, inner: int, num_heads: int, length: int):
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Loss(LlamaForCausalLM(config)), (torch.empty(1, length, dtype=torch.int64),)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


class FastAttention(nn.Module):
    """Attention of PyTorch's own operator."""

    def __init__(self, width: int, num_heads: int, *, causal: bool, context: int = 0) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.kv = nn.Linear(context or width, 2 * width, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        q, k, v = (_heads(y, self.num_heads) for y in (self.q(x), k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class RoutedExperts(nn.Module):
    """Each expert takes the tokens that score highest for it (Zhou et al. 2022)."""

    def __init__(self, width: int, inner: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(num_experts, width, inner)) for _ in "gu")
        self.down = nn.Parameter(torch.empty(num_experts, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1).t()
        weights, chosen = scores.topk(2 * scores.shape[1] // scores.shape[0], dim=-1)
        mine = tokens[chosen]
        mine = (F.silu(mine @ self.gate) * (mine @ self.up)) @ self.down
        mine = (mine * weights.unsqueeze(-1)).flatten(0, 1)
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), mine).view_as(x)


class RoutedLayer(nn.Module):
    def __init__(self, width: int, inner: int, num_experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.attention = FastAttention(width, width // 128, causal=True)
        self.experts = RoutedExperts(width, inner, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


class RoutedModel(nn.Module):
    def __init__(self, depth: int, width: int, inner: int, num_experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32000, width)
        self.layers = nn.ModuleList(RoutedLayer(width, inner, num_experts) for _ in range(depth))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, 32000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class TimedConvolutions(nn.Module):
    """A residual block of a diffusion model, which knows the time."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        y = self.second(F.silu(self.norm2(y)))
        return y + (x if self.shortcut is None else self.shortcut(x))


class TextAttention(nn.Module):
    """Attention of an image to itself and to a text, and a gated product."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = FastAttention(width, 8, causal=False)
        self.cross = FastAttention(width, 8, causal=False, context=text)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x = image.flatten(2).transpose(1, 2)
        x = x + self.own(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), text)
        value, gate = self.up(self.norms[2](x)).chunk(2, -1)
        x = x + self.down(value * F.gelu(gate))
        return x.transpose(1, 2).reshape(image.shape)


class TimedBlock(nn.Module):
    def __init__(self, before: int, after: int, time: int, text: int) -> None:
        super().__init__()
        self.convolutions = TimedConvolutions(before, after, time)
        self.attention = TextAttention(after, text) if text else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.convolutions(x, time)
        return x if self.attention is None else self.attention(x, text)


class DiffusionUNet(nn.Module):
    """A U-Net shaped like that of Stable Diffusion: three levels of four have attention."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        time, widths = 4 * width, [width, 2 * width, 4 * width, 4 * width]
        self.enter, self.leave = (
            nn.Conv2d(4, width, 3, padding=1),
            nn.Conv2d(width, 4, 3, padding=1),
        )
        self.down, self.up, skips, now = nn.ModuleList(), nn.ModuleList(), [width], width
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, after in enumerate(widths):
            for _ in range(2):
                self.down.append(TimedBlock(now, after, time, text if level < 3 else 0))
                now = after
                skips.append(now)
            if level < 3:
                self.shrink.append(nn.Conv2d(now, now, 3, stride=2, padding=1))
                skips.append(now)
        self.middle = TimedBlock(now, now, time, text)
        for level, after in reversed(list(enumerate(widths))):
            for _ in range(3):
                block = TimedBlock(now + skips.pop(), after, time, text if level < 3 else 0)
                self.up.append(block)
                now = after
            if level:
                self.grow.append(nn.Conv2d(now, now, 3, padding=1))

    def forward(self, latents: Tensor, time: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        x = self.enter(latents)
        skips = [x]
        for i, block in enumerate(self.down):
            x = block(x, time, text)
            skips.append(x)
            if i % 2 and i < 7:
                x = self.shrink[i // 2](x)
                skips.append(x)
        x = self.middle(x, time, text)
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], 1), time, text)
            if i % 3 == 2 and i < 11:
                x = self.grow[i // 3](F.interpolate(x, scale_factor=2.0))
        return F.mse_loss(self.leave(x), noise)


def _routed(depth: int, width: int, inner: int, num_experts: int, length: int):
    model = RoutedModel(depth, width, inner, num_experts)
    return model, (torch.empty(1, length, dtype=torch.int64),)


def _diffusion(width: int, text: int, batch: int, size: int):
    latents, noise = (torch.empty(batch, 4, size, size) for _ in range(2))
    inputs = (latents, torch.empty(batch, 4 * width), torch.empty(batch, 77, text), noise)
    return DiffusionUNet(width, text), inputs


def _on_meta_in_bfloat16(function: Callable, *args: int) -> Callable:
    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        with torch.device("meta"):
            module, inputs = function(*args)
        to = (x.bfloat16() if x.is_floating_point() else x for x in inputs)
        return module.to(torch.bfloat16), tuple(to)

    return build


_LLAMA = ("model.model.layers.*",)
_DIFFUSION = ("down.*", "middle", "up.*")

REAL_SIZES: dict[str, Model] = {
    "llama-8b": Model(_on_meta_in_bfloat16(_llama, 32, 4096, 14336, 32, 4096), _LLAMA, large=True),
    # of fewer tokens the peak is that of all gradients, which no plan lowers
    "llama-70b": Model(
        _on_meta_in_bfloat16(_llama, 80, 8192, 28672, 64, 16384), _LLAMA, large=True
    ),
    "long-context": Model(
        _on_meta_in_bfloat16(_llama, 4, 4096, 14336, 32, 131072), _LLAMA, large=True
    ),
    "routed-12": Model(
        _on_meta_in_bfloat16(_routed, 12, 2048, 7168, 8, 8192), ("layers.*",), large=True
    ),
    "diffusion": Model(_on_meta_in_bfloat16(_diffusion, 320, 768, 8, 64), _DIFFUSION, large=True),
}
