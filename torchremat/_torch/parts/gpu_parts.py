"""Kernels of GPUs, which traces on the CPU take in place of those of the CPU."""

from .part import PrivatePart

_WHY = "To plan a step for a GPU that is not here with the kernels that run there."
_PUBLIC = "PyTorch has no public function that chooses the kernels of another device."
_WITHOUT = "Plans for a GPU would have the operators of the CPU."

GPU_PARTS = (
    PrivatePart(
        "torch.ops.aten: _scaled_dot_product_attention_math, "
        "_scaled_dot_product_cudnn_attention, _scaled_dot_product_flash_attention, "
        "_scaled_dot_product_efficient_attention",
        _WHY, _PUBLIC, _WITHOUT,
    ),
    PrivatePart(
        "torch.ops.aten: _softmax, _log_softmax, _batch_norm_impl_index, _fused_rms_norm, "
        "_fused_rms_norm_backward",
        _WHY, _PUBLIC, _WITHOUT,
    ),
    PrivatePart(
        "torch.ops.aten: _thnn_fused_lstm_cell, _thnn_fused_gru_cell, "
        "_thnn_fused_gru_cell_backward, _cudnn_rnn, _cudnn_rnn_backward",
        _WHY, _PUBLIC, _WITHOUT,
    ),
    PrivatePart(
        "torch._C: _ExcludeDispatchKeyGuard, DispatchKeySet, DispatchKey, "
        "_dispatch_get_registrations_for_dispatch_key",
        "To run an operator below autocast, with its arguments cast.",
        "`torch.autocast(enabled=False)` would end it for what the operator calls, too.",
        "A step under the autocast of a GPU would be planned with the casts of the CPU.",
    ),
    PrivatePart(
        "torch._subclasses.fake_tensor: is_fake",
        "Whether a tensor that `torch.func` has wrapped is of a trace.",
        "None.",
        "Inside `vmap` and `grad` plans for a GPU would have the operators of the CPU.",
    ),
    PrivatePart(
        "torch._C: _get_sdp_priority_order",
        "The order of kernels of attention that a user asked for.",
        "`sdpa_kernel` sets it, and nothing public reads it.",
        "A plan might have another kernel than the user asked for.",
    ),
)  # fmt: skip
