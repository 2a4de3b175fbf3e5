"""Private parts of tensors, modules and trees."""

from .part import PrivatePart

TENSORS = (
    PrivatePart(
        "torch.Tensor: _is_view",
        "Whether a tensor is a view: it then shares memory that others may read.",
        "None: torch.Tensor has no public name for it.",
        "Memory would be counted twice, or freed under a view.",
    ),
    PrivatePart(
        "torch.Tensor: _base",
        "Whether a tensor shares the memory of a parameter, so that it takes none of its own.",
        "torch.Tensor has no public name for it.",
        "Parts of weights would count in the budget of a step.",
    ),
    PrivatePart(
        "torch.Tensor: _version",
        "Whether a tensor was written to since it was captured.",
        "None.",
        "A replay could read what was written since, silently.",
    ),
    PrivatePart(
        "torch.Tensor: _use_count",
        "Whether a residual has other users, before its memory is moved to the host.",
        "sys.getrefcount counts references of Python, not those of C++.",
        "Offloading could free nothing, or what is in use.",
    ),
    PrivatePart(
        "torch._C: _storage_Use_Count",
        "As above, for the memory of the tensor.",
        "As above.",
        "As above.",
    ),
    PrivatePart(
        "torch.UntypedStorage: _cdata",
        "A number that tensors have in common which share memory, also fake ones.",
        "data_ptr raises for fake tensors; the id of the Python object is promised nowhere.",
        "Aliases among fake tensors could not be found.",
    ),
    PrivatePart(
        "torch.Tensor: _make_wrapper_subclass",
        "A tensor without memory, which stands for an offloaded residual.",
        "torch.Tensor.__new__ allocates.",
        "Offloaded residuals would need a class of their own in user code.",
    ),
    PrivatePart(
        "torch._C: _set_throw_on_mutable_data_ptr",
        "Such a tensor raises where C++ asks for its memory.",
        "None.",
        "DLPack would pass on a null pointer.",
    ),
    PrivatePart(
        "torch._C: _swap_tensor_impl",
        "To take the memory out of a tensor that others refer to, and to put it back.",
        "torch.utils.swap_tensors swaps classes too, and refuses tensors with weak references.",
        "Residuals that autograd has saved could not be offloaded.",
    ),
    PrivatePart(
        "torch.Tensor: _indices, _values",
        "The parts of a sparse tensor that is not coalesced.",
        "indices() and values() raise for such.",
        "Such tensors could not be inputs of a trace.",
    ),
    PrivatePart(
        "torch: _neg_view",
        "A fake tensor that is negated lazily, as an input of a trace may be.",
        "x.conj().imag gives one, of real numbers and with other strides alone.",
        "x.is_neg() in a traced function would say False.",
    ),
    PrivatePart(
        "torch.nn.Module(): _forward_hooks, _forward_pre_hooks, _backward_hooks, "
        "_backward_pre_hooks",
        "Which hooks a module has: a guard of a trace reads them at each call.",
        "None lists hooks.",
        "A hook that is added after a trace would be ignored, silently.",
    ),
    PrivatePart(
        "torch.nn.Module(): _buffers, _parameters",
        "To undo what a trace does to the attributes of a module.",
        "setattr and register_buffer check, and move names to the end.",
        "A trace would leave fake tensors in modules.",
    ),
    PrivatePart(
        "torch.nn.modules.module: _global_forward_hooks, _global_forward_pre_hooks, "
        "_global_backward_hooks, _global_backward_pre_hooks",
        "Which hooks all modules have: a guard of a trace, and trackers to set aside.",
        "None lists hooks.",
        "A global hook that is added after a trace would be ignored, silently.",
    ),
    PrivatePart(
        "torch.utils._pytree: TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten, "
        "tree_map, keystr, register_pytree_node, GetAttrKey, SequenceKey",
        "Trees, with the classes that users and libraries have registered there.",
        "A registry of our own would not know those; PyTorch has no public module for trees.",
        "Arguments such as the outputs of transformers would be no trees.",
    ),
)
