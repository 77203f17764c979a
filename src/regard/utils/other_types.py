"""What a value is that stands where a tensor, a mask or a bias is needed, and how it becomes one, for messages."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigurationError


def name_type(name: str, value: object, *, of_function: str = "") -> str:
    """The type of a value that is of no use as it is, and the conversion that helps, if there is one.

    name: of the argument. of_function: the conversion of a function.

    >>> name_type("query", [1.0, 2.0])
    'a list: pass torch.as_tensor(query)'
    >>> name_type("mask", max, of_function="masks.from_mod(mask)")
    'a builtin_function_or_method: pass masks.from_mod(mask)'
    >>> name_type("key", None)
    'None'
    """
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor{'' if value.is_nested else f' {tuple(value.shape)}'}"
    if value is None:
        return "None"
    has = f"a {type(value).__name__}"
    if isinstance(value, list | tuple | float | int) or hasattr(value, "__array__"):
        return f"{has}: pass torch.as_tensor({name})"
    if type(value).__name__ == "BlockMask":
        return f"{has} of FlexAttention: pass mask=masks.from_block_mask({name})"
    if "AttentionBias" in (base.__name__ for base in type(value).__mro__):
        return f"{has} of xformers: pass **masks.from_xformers({name}, queries, keys)"
    return f"{has}: pass {of_function}" if callable(value) and of_function else has


def needs_tensor(name: str, value: object) -> str:
    """The sentence for what is no tensor, or a tensor whose numbers are not all in memory; empty for any other tensor.

    >>> import torch
    >>> needs_tensor("query", torch.eye(2).to_sparse())
    'query is a tensor of the layout torch.sparse_coo, without its zeros in memory: pass query.to_dense()'
    """
    if not isinstance(value, Tensor):
        return f"{name} needs a torch.Tensor; it is {name_type(name, value)}"
    if value.layout is not torch.strided and not value.is_nested:
        return f"{name} is a tensor of the layout {value.layout}, without its zeros in memory: pass {name}.to_dense()"
    return ""


def path_of(name: str, value: object) -> Path:
    """A path, of a text or a path.

    Raises:
        ConfigurationError: it is neither, such as None or the number of an open file.

    >>> path_of("folder", "runs/english").name
    'english'
    """
    try:
        return Path(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigurationError(f"{name} is {value!r}; it needs a path, such as 'runs/first'") from error
