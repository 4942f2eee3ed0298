"""Which operations a compiler fuses, and which are a kernel of their own."""

from __future__ import annotations

from typing import Any

import torch

#: Reductions, and copies by a rule: generated code reads their inputs and computes them where they are wanted. What
#: torch tags as pointwise is fused as well; everything else runs as a kernel whose inputs and outputs lie in memory.
_FUSED = frozenset({
    "_fused_rms_norm", "_log_softmax", "_softmax", "_to_copy", "amax", "amin", "any", "arange", "argmax",
    "argmin", "cat", "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "cumsum", "embedding",
    "empty", "empty_like", "empty_strided", "fill", "fill_", "flatten", "flip", "full", "full_like", "gather",
    "index", "index_select", "lift_fresh_copy", "linalg_vector_norm", "logsumexp", "masked_fill",
    "masked_fill_", "max", "mean", "min", "native_layer_norm", "new_empty", "new_empty_strided", "new_full",
    "new_ones", "new_zeros", "one_hot", "ones", "ones_like", "pad", "polar", "repeat", "repeat_interleave",
    "reshape", "roll", "scalar_tensor", "select_scatter", "slice_scatter", "softmax", "stack", "sum", "to",
    "var", "var_mean", "where", "zero_", "zeros", "zeros_like",
})  # fmt: skip
#: Made of nothing, or of numbers alone: never kept where generated code can make it again.
_CREATED = frozenset({
    "arange", "empty", "full", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "scalar_tensor",
    "zeros",
})  # fmt: skip


def is_fused(func: Any) -> bool:
    """Whether the operation disappears in the kernels around it."""
    return _name(func) in _FUSED or torch.Tag.pointwise in func.tags


def is_created(func: Any) -> bool:
    return _name(func) in _CREATED


def _name(func: Any) -> str:
    """Without the namespace of torch's own; others keep theirs."""
    name: str = func._schema.name
    return name.removeprefix("aten::")


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that it changes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(given, torch.Tensor):
                found.append(given)
    return found
