"""Modules under `checkpoint`: `wrap`, `unwrap`, and what they kept, `report`."""

from torchremat.nn.wrap import report, unwrap, wrap

__all__ = ["report", "unwrap", "wrap"]
