"""Where an operator of a compiler's graph comes from, in the words of Dynamo."""

import re
from collections.abc import Mapping
from typing import Any

from torchremat.core.source import Source, is_user_file

_MODULE = re.compile(r"_modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]|([^.\[\]]+)")
_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def module_name(meta: Mapping[str, Any]) -> str:
    """The qualified name of the innermost module that ran an operator, by its `nn_module_stack`.

    The module that is compiled is called `''`, one that a compiled function calls by its class.

    >>> module_name({"nn_module_stack": {"": ("L['self'].layers[0]._modules['fc']", object)}})
    'layers.0.fc'
    >>> module_name({"nn_module_stack": {"a": ("L['f']", "Block"), "b": ("L['f'].fc", "Linear")}})
    'Block.fc'
    """
    stack = list((meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    outermost, innermost = _parts(stack[0][0]), _parts(stack[-1][0])
    parts = innermost[1:]
    if len(outermost) == 1 and outermost[0] != "self":
        kind = stack[0][1]
        parts = [kind if isinstance(kind, str) else kind.__name__, *parts]
    return ".".join(parts)


def _parts(path: str) -> list[str]:
    """The parts of a path such as `L['self'].layers[0]._modules['fc']`: self, layers, 0, fc."""
    found = [next(filter(None, groups), "") for groups in _MODULE.findall(path)]
    return found[1:] if found[:1] in (["L"], ["G"]) else found


def source_of(meta: Mapping[str, Any]) -> Source | None:
    r"""The innermost line of the user's that an operator comes from, by its `stack_trace`.

    >>> print(source_of({"stack_trace": '  File "/home/ann/model.py", line 3, in f\n    x.sin()'}))
    model.py:3 (f)
    """
    for file, line, function in reversed(_LINE.findall(meta.get("stack_trace") or "")):
        if is_user_file(file):
            return Source(file, int(line), function)
    return None
