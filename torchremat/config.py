"""Settings of the whole library, read by the public functions only.

>>> import torchremat as tr
>>> tr.config.log_checkpoint_residuals
False
"""

import os
from typing import Literal

log_checkpoint_residuals: bool = os.environ.get(
    "TORCHREMAT_LOG_CHECKPOINT_RESIDUALS", "0"
).lower() in {"1", "true", "yes", "on"}
"""Log what each differentiated checkpoint saves at WARNING rather than DEBUG."""

verify_recomputation: Literal["bitwise"] | None = None
"""`"bitwise"`: compare each value that a backward pass computes again with what it was, and raise
`errors.RecomputationError` at the first that differs, with its module and source line. It keeps
what it compares. Off, it costs nothing."""
