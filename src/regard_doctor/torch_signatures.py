"""The functions, methods and modules of torch that the doctor understands, under one operation name each."""

from __future__ import annotations

from .term import COMPARISONS

PARAMETERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bool", "contiguous", "exp", "invert", "negative", "rsqrt", "sqrt", "tanh"), ("input",)),
    **dict.fromkeys(("ones_like", "zeros_like"), ("input",)),
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "matmul", *COMPARISONS), ("input", "other")),
    **dict.fromkeys(
        ("argmax", "log_softmax", "max", "mean", "squeeze", "sum", "unbind", "unsqueeze"), ("input", "dim")
    ),
    **dict.fromkeys(("tril", "triu"), ("input", "diagonal")),
    **dict.fromkeys(("cat", "stack"), ("tensors", "dim")),
    **dict.fromkeys(("arange", "ones", "zeros"), ("*size",)),
    "chunk": ("input", "chunks", "dim"),
    "clamp": ("input", "min", "max"),
    "dropout": ("input", "p", "training", "inplace"),
    "einsum": ("*operands",),
    "expand": ("input", "*size"),
    "flatten": ("input", "start_dim", "end_dim"),
    "full": ("size", "fill_value"),
    "full_like": ("input", "fill_value"),
    "masked_fill": ("input", "mask", "value"),
    "multinomial": ("input", "num_samples"),
    "normalize": ("input", "p", "dim"),
    "permute": ("input", "*dims"),
    "rearrange": ("input", "pattern"),
    "repeat": ("input", "*sizes"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "reshape": ("input", "*shape"),
    "sdpa": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    "flex": ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa"),
    "block_mask": ("mask_mod", "B", "H", "Q_LEN", "KV_LEN"),
    "size": ("input", "dim"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
    "split": ("input", "split_size", "dim"),
    "subsequent_mask": ("size",),
    "transpose": ("input", "dim0", "dim1"),
    "unflatten": ("input", "dim", "sizes"),
    "where": ("condition", "input", "other"),
}
"""Parameter names of each operation, the tensor first; one that begins with `*` takes the rest as `Term.items`."""

_SAME_NAME = (
    *("add", "arange", "argmax", "cat", "chunk", "clamp", "div", "einsum", "exp", "flatten", "full", "full_like"),
    *("log_softmax", "masked_fill", "matmul", "max", "mean", "mul", "multinomial", "not_equal", "ones", "ones_like"),
    *("permute", "pow", "repeat_interleave", "reshape", "rsqrt", "softmax", "split", "sqrt", "squeeze", "stack", "sub"),
    *("sum", "tanh", "transpose", "tril", "triu", "unbind", "unflatten", "unsqueeze", "where", "zeros", "zeros_like"),
)
_TORCH = {
    **{name: name for name in _SAME_NAME},
    **dict.fromkeys(("bmm", "mm"), "matmul"),
    **dict.fromkeys(("concat", "concatenate"), "cat"),
    **dict.fromkeys(("divide", "true_divide"), "div"),
    **dict.fromkeys(("swapaxes", "swapdims"), "transpose"),
    **dict.fromkeys(("logical_not", "bitwise_not"), "invert"),
    **dict.fromkeys(("logical_and", "bitwise_and"), "and"),
    **dict.fromkeys(("logical_or", "bitwise_or"), "or"),
    **dict(zip(("eq", "ne", "lt", "le", "gt", "ge"), COMPARISONS, strict=True)),
    "multiply": "mul",
    "subtract": "sub",
    "tile": "repeat",
    "neg": "negative",
}
"""Functions of the module torch (and, by the same name, of NumPy) and the operation of each."""

FUNCTIONS: dict[str, str] = {
    **{f"{module}.{name}": op for module in ("torch", "numpy") for name, op in _TORCH.items()},
    "torch.special.softmax": "softmax",
    "torch.nn.functional.softmax": "softmax",
    "torch.nn.functional.log_softmax": "log_softmax",
    "torch.nn.functional.dropout": "dropout",
    "torch.nn.functional.normalize": "normalize",
    "torch.nn.functional.scaled_dot_product_attention": "sdpa",
    "torch.nn.attention.flex_attention.flex_attention": "flex",
    "torch.nn.attention.flex_attention.create_block_mask": "block_mask",
    "torch.nn.Transformer.generate_square_subsequent_mask": "subsequent_mask",
    "einops.rearrange": "rearrange",
    "einops.einsum": "einsum",
    "opt_einsum.contract": "einsum",
    "math.sqrt": "sqrt",
    "math.pow": "pow",
}
"""The operation of each function, by its qualified name."""

METHODS: dict[str, str] = {
    **{name: op for name, op in _TORCH.items() if name not in ("arange", "full", "ones", "zeros", "einsum", "concat")},
    **{name: name for name in ("bool", "contiguous", "expand", "repeat", "size")},
    **dict.fromkeys(("clone", "detach"), "contiguous"),
    "view": "reshape",
}
"""The operation of each method of a tensor."""

CASTS = {"float": "torch.float32", "half": "torch.float16", "bfloat16": "torch.bfloat16", "double": "torch.float64"}
"""Methods that convert a tensor, and the dtype that each converts to."""

_DECODER = (
    *("tgt", "memory", "tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask", "tgt_is_causal"),
    "memory_is_causal",
)
FORWARD: dict[str, tuple[str, ...]] = {
    "torch.nn.MultiheadAttention": (
        *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights"),
        "is_causal",
    ),
    "torch.nn.TransformerEncoder": ("src", "mask", "src_key_padding_mask", "is_causal"),
    "torch.nn.TransformerEncoderLayer": ("src", "src_mask", "src_key_padding_mask", "is_causal"),
    **dict.fromkeys(("torch.nn.TransformerDecoder", "torch.nn.TransformerDecoderLayer"), _DECODER),
    "torch.nn.Transformer": (
        *("src", "tgt", "src_mask", "tgt_mask", "memory_mask", "src_key_padding_mask", "tgt_key_padding_mask"),
        *("memory_key_padding_mask", "src_is_causal", "tgt_is_causal", "memory_is_causal"),
    ),
    "torch.nn.Softmax": ("input",),
    "torch.nn.Dropout": ("input",),
}
"""Parameter names of `forward` of the modules of torch that compute attention, or part of it."""

_LAYER = ("d_model", "nhead", "dim_feedforward", "dropout", "activation", "layer_norm_eps", "batch_first")
CONSTRUCTORS: dict[str, tuple[str, ...]] = {
    "torch.nn.MultiheadAttention": (
        *("embed_dim", "num_heads", "dropout", "bias", "add_bias_kv", "add_zero_attn", "kdim", "vdim", "batch_first"),
    ),
    "torch.nn.TransformerEncoder": ("encoder_layer", "num_layers"),
    "torch.nn.TransformerDecoder": ("decoder_layer", "num_layers"),
    **dict.fromkeys(("torch.nn.TransformerEncoderLayer", "torch.nn.TransformerDecoderLayer"), _LAYER),
    "torch.nn.Transformer": (
        *("d_model", "nhead", "num_encoder_layers", "num_decoder_layers", "dim_feedforward", "dropout", "activation"),
        *("custom_encoder", "custom_decoder", "layer_norm_eps", "batch_first"),
    ),
    "torch.nn.Softmax": ("dim",),
    "torch.nn.Dropout": ("p",),
    "torch.nn.Linear": ("in_features", "out_features"),
    "torch.nn.Embedding": ("num_embeddings", "embedding_dim"),
}
"""Parameter names of the constructors of those modules."""

ALIASES = {
    "torch": "torch",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "math": "math",
    "np": "numpy",
    "einops": "einops",
}
"""What a name that no import of the file binds usually means, as in a cell of a notebook."""
