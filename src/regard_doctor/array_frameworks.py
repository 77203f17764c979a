"""JAX, Flax, Keras and TensorFlow in the operations of torch: names, orders of arguments, meanings of masks.

A call of them becomes the `Term` that the same call of torch has, so that rules about formulas read it too. Their
attention takes masks of which True, or 1, means *attend*, and arrays (batch, length, heads, dim); Keras' layer takes
query, value, key in this order.

Sources: the pages of jax.nn.dot_product_attention, flax.linen.dot_product_attention, keras.layers.MultiHeadAttention,
keras.ops.dot_product_attention and tf.linalg.band_part.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from functools import reduce

from .term import COMPARISONS, Term, is_none, is_true, number

FRAMEWORKS = ("jax", "flax", "keras", "tensorflow")
"""What is read, in the words of the summary; files that name torch too are read as files of torch."""

_ROOTS = {"tf_keras": "keras", "keras_core": "keras", "keras_hub": "keras", **{name: name for name in FRAMEWORKS}}
_SHORTER = (
    (re.compile(r"^tensorflow\.(compat\.v[12]|python)\."), "tensorflow."),
    (re.compile(r"^(tensorflow\.keras|tf_keras|keras_core|keras\.src)\."), "keras."),
    (re.compile(r"^flax\.(experimental\.)?(linen|nnx)\.(nn\.)?(attention|linear|activation)\."), r"flax.\2."),
    (re.compile(r"^flax\.experimental\.nnx\."), "flax.nnx."),
    (re.compile(r"^jax\.(_src\.)?(numpy|nn)\.(functions|lax_numpy)\."), r"jax.\2."),
)


def framework_of(imported: Iterable[str]) -> str:
    """The framework whose arrays a file computes with, by what it imports; "" for one of torch, and for neither.

    >>> framework_of(["jax.numpy", "flax.linen"]), framework_of(["torch", "jax"])
    ('jax', '')
    """
    roots = [name.partition(".")[0] for name in imported]
    if any(root in ("torch", "transformers") for root in roots):
        return ""
    return next((_ROOTS[root] for root in roots if root in _ROOTS), "")


def public_name(name: str) -> str:
    """A qualified name by its shortest public path.

    >>> public_name("tensorflow.keras.layers.Dense"), public_name("tensorflow.compat.v1.matrix_band_part")
    ('keras.layers.Dense', 'tensorflow.matrix_band_part')
    """
    for pattern, shorter in _SHORTER:
        name = pattern.sub(shorter, name)
    return name


_OPERATIONS = {
    **{name: name for name in ("add", "cast", "exp", "log_softmax", "maximum", "negative", "pow", "rsqrt", "softmax")},
    **{name: name for name in ("sqrt", "tanh", "where", *COMPARISONS)},
    **{name: name for name in ("arange", "einsum", "full", "full_like", "matmul", "ones", "ones_like", "reshape")},
    **{name: name for name in ("squeeze", "stack", "tril", "triu", "zeros", "zeros_like")},
    **{f"{reduce}{name}": name for reduce in ("", "reduce_") for name in ("sum", "mean", "max")},
    **dict.fromkeys(("divide", "true_divide"), "div"),
    **dict.fromkeys(("concat", "concatenate"), "cat"),
    **dict.fromkeys(("transpose", "permute_dimensions"), "permute"),
    "subtract": "sub",
    "multiply": "mul",
    "power": "pow",
    "clip": "clamp",
    "logical_not": "invert",
    "logical_and": "and",
    "logical_or": "or",
    "shape": "size",
    "broadcast_to": "expand",
    "dot": "matmul",
    "expand_dims": "unsqueeze",
    "fill": "full",
    "range": "arange",
    "repeat": "repeat_interleave",
    "split": "chunk",
    "swapaxes": "transpose",
    "tile": "repeat",
}
FUNCTIONS: dict[str, str] = {
    **{
        f"{module}.{name}": op
        for module in ("jax.numpy", "tensorflow", "tensorflow.math", "keras.ops", "keras.backend")
        for name, op in _OPERATIONS.items()
    },
    **{f"{module}.softmax": "softmax" for module in ("jax.nn", "flax.linen", "flax.nnx", "tensorflow.nn")},
    "keras.activations.softmax": "softmax",
    "keras.ops.nn.softmax": "softmax",
    "jax.lax.rsqrt": "rsqrt",
    "tensorflow.linalg.matmul": "matmul",
    "jax.lax.batch_matmul": "matmul",
    "tensorflow.linalg.einsum": "einsum",
}
"""The operation of each function, by its public name."""

PARAMETERS = {**dict.fromkeys(("and", "or", "maximum"), ("input", "other")), "cast": ("input", "dtype")}
"""Parameters of operations that are operators in torch."""
KEYWORDS = {
    **dict.fromkeys(("x1", "a", "x", "params", "logits"), "input"),
    **dict.fromkeys(("x2", "b", "y"), "other"),
    **dict.fromkeys(("values", "xs", "arrays"), "tensors"),
    **dict.fromkeys(("num_or_size_splits", "indices_or_sections"), "chunks"),
    **dict.fromkeys(("multiples", "reps", "perm", "axes", "newshape", "shape"), "*"),
    "axis": "dim",
    "axis1": "dim0",
    "axis2": "dim1",
    "k": "diagonal",
}
"""Keyword arguments by torch's names; `*` are sizes or axes in a tuple."""

LINEAR = frozenset(
    {
        *("flax.linen.Dense", "flax.linen.DenseGeneral", "flax.nnx.Linear", "flax.nnx.LinearGeneral"),
        *("keras.layers.Dense", "keras.layers.EinsumDense"),
    }
)
"""Layers that are `nn.Linear` to the rules."""
DROPOUT = frozenset({"flax.linen.Dropout", "flax.nnx.Dropout", "keras.layers.Dropout"})
"""Layers that are `nn.Dropout` to the rules."""
FORWARD_NAMES = ("forward", "__call__", "call")
"""Methods that run when a module is called."""

_ATTENTION_FUNCTIONS = frozenset(
    {
        *("jax.nn.dot_product_attention", "flax.linen.dot_product_attention", "flax.nnx.dot_product_attention"),
        *("keras.ops.dot_product_attention", "keras.ops.nn.dot_product_attention"),
    }
)
KERAS_LAYERS = frozenset(
    f"keras.layers.{name}" for name in ("MultiHeadAttention", "GroupQueryAttention", "GroupedQueryAttention")
)
FLAX_LAYERS = frozenset(
    {
        *("flax.linen.MultiHeadDotProductAttention", "flax.linen.MultiHeadAttention", "flax.linen.SelfAttention"),
        "flax.nnx.MultiHeadAttention",
    }
)
LAYERS = KERAS_LAYERS | FLAX_LAYERS
"""Layers that project and attend; their `Term` is "apply", with the arguments of torch's operator."""

Made = Callable[..., Term]
"""How a term is made: `made(op, node, arguments, items, value)`."""


def framework_call(
    name: str, node: ast.Call, positional: list[Term], named: dict[str, Term], made: Made
) -> tuple[Term, bool] | None:
    """The term of a call of attention, of a mask or a band, and whether it is an event; None for other functions."""
    if name in _ATTENTION_FUNCTIONS:
        return made("sdpa", node, _attention_arguments(positional, named, node, made), (), name), True
    if name.endswith(("linalg.band_part", "matrix_band_part")) and len(positional) == 3:
        return _band_part(positional, node, made), True
    if name.endswith(".make_causal_mask") and (positional or "x" in named):
        sizes = (Term("constant", node, value=2),) * 2  # of any length
        ones = made("ones", node, {}, tuple(Term("size", node, {"input": one}, value=-1) for one in sizes), name)
        return made("bool", node, {"input": made("tril", node, {"input": ones}, (), name)}, (), name), True
    if name.endswith(".make_attention_mask") and len(positional) > 1:
        rows = [
            made("unsqueeze", node, {"input": one, "dim": Term("constant", node, value=dim)})
            for one, dim in zip(positional, (-1, -2), strict=False)
        ]
        return made("and", node, {"input": rows[0], "other": rows[1]}, (), name), True
    if name.endswith(".combine_masks") and positional:
        return reduce(lambda one, other: made("and", node, {"input": one, "other": other}), positional), False
    if name == "jax.numpy.tri":
        dtype = {"dtype": named["dtype"]} if "dtype" in named else {}
        ones = made("ones", node, dtype, tuple((positional * 2)[:2]), name)
        return made("tril", node, {"input": ones}, (), name), True
    return None


def operands(
    op: str, name: str, positional: list[Term], named: dict[str, Term], node: ast.Call, made: Made
) -> tuple[list[Term], dict[str, Term]]:
    """The arguments of an operation in torch's names and order; TensorFlow's transposes of a product are done."""
    renamed = {KEYWORDS.get(key, key): term for key, term in named.items()}
    positional = [*positional, *(term for key, term in named.items() if KEYWORDS.get(key) == "*")]
    renamed.pop("*", None)
    if op in ("ones", "zeros", "full") and positional and positional[0].op == "tuple":
        positional = positional[: 2 if op == "full" else 1]
    if op == "cat" and "dim" not in renamed and len(positional) == 1:
        renamed["dim"] = Term("constant", node, value=0)
    if op == "softmax" and "dim" not in renamed and len(positional) < 2:
        renamed["dim"] = made("negative", node, {"input": Term("constant", node, value=1)})
    if op == "matmul":
        flags = (is_true(renamed.pop(name, None)) for name in ("transpose_a", "transpose_b"))
        positional = [
            made("transpose", node, {"input": one}, (), "mT") if flag else one
            for one, flag in zip(positional, flags, strict=False)
        ]
    return positional, renamed


def layer_arguments(
    layer: str, positional: list[Term], named: dict[str, Term], node: ast.Call, made: Made
) -> dict[str, Term]:
    """The arguments of a layer that attends, by the names of torch's operator."""
    found: dict[str, Term] = {}
    if layer in KERAS_LAYERS:
        order = ("query", "value", "key")
        found.update(zip(order, positional, strict=False))
        found.update({key: named[key] for key in order if key in named})
        found.setdefault("key", found.get("value", Term("unknown", node)))
        mask = named.get("attention_mask")
        if "use_causal_mask" in named:
            found["is_causal"] = named["use_causal_mask"]
    else:
        given = [one for one in positional if not _is_mask(one)]
        masks = [one for one in positional if _is_mask(one)]
        later = ("inputs_q", "inputs_k", "inputs_v")[len(given) :]
        given += [named[key] for key in (*later, "inputs_kv") if key in named]
        given += given[-1:] * (3 - len(given))  # one for queries, keys and values, or for both of the latter
        found.update(zip(("query", "key", "value"), given, strict=False))
        mask = named.get("mask", masks[0] if masks else None)
    if mask is not None:
        found["attn_mask"] = _as_booleans(mask, node, made)
    return found


def _attention_arguments(positional: list[Term], named: dict[str, Term], node: ast.Call, made: Made) -> dict[str, Term]:
    order = ("query", "key", "value", "bias", "mask")
    found = dict(zip(order, positional, strict=False)) | named
    bias, mask = found.pop("bias", None), found.pop("mask", None)
    if mask is not None and not is_none(mask):
        bias = _as_booleans(mask, node, made)
    return found if bias is None or is_none(bias) else found | {"attn_mask": bias}


def _as_booleans(mask: Term, node: ast.Call, made: Made) -> Term:
    """A mask of which the numbers 0 and 1 are taken as False and True."""
    if is_none(mask):
        return mask
    if mask.op == "choice":
        return made("choice", mask.node, {}, tuple(_as_booleans(one, node, made) for one in mask.items), mask.value)
    return made("bool", mask.node, {"input": mask})


def _band_part(positional: list[Term], node: ast.Call, made: Made) -> Term:
    """`band_part(x, lower, upper)`: lower and upper diagonals are kept, all of them where the number is negative."""
    band, lower, upper = positional
    if (number(upper) or 0) >= 0:
        band = made("tril", node, {"input": band, "diagonal": upper}, (), "band_part")
    if (number(lower) or 0) >= 0:
        below = made("negative", node, {"input": lower})
        band = made("triu", node, {"input": band, "diagonal": below}, (), "band_part")
    return band


def _is_mask(term: Term) -> bool:
    """Whether a positional argument of Flax's layers is the mask, by how it is made or named."""
    if term.op in ("bool", "and", "tril", "equal", "not_equal", "invert") or str(term.value).endswith("_mask"):
        return True
    return term.op in ("parameter", "attribute", "name", "call") and "mask" in str(term.value)
