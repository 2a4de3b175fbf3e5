"""Settings of the whole library, read by the public functions only.

>>> import torchremat as tr
>>> tr.config.log_checkpoint_residuals
False
"""

import os

log_checkpoint_residuals: bool = os.environ.get(
    "TORCHREMAT_LOG_CHECKPOINT_RESIDUALS", "0"
).lower() in {"1", "true", "yes", "on"}
"""Log what each differentiated checkpoint saves at WARNING rather than DEBUG."""
