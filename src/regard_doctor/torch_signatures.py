"""The functions, methods and modules of torch that the doctor understands, under one operation name each."""

from __future__ import annotations

PARAMETERS: dict[str, tuple[str, ...]] = {
    "add": ("input", "other"),
    "arange": ("*size",),
    "bool": ("input",),
    "cat": ("tensors", "dim"),
    "chunk": ("input", "chunks", "dim"),
    "clamp": ("input", "min", "max"),
    "contiguous": ("input",),
    "div": ("input", "other"),
    "dropout": ("input", "p", "training", "inplace"),
    "einsum": ("*operands",),
    "equal": ("input", "other"),
    "exp": ("input",),
    "expand": ("input", "*size"),
    "flatten": ("input", "start_dim", "end_dim"),
    "full": ("size", "fill_value"),
    "full_like": ("input", "fill_value"),
    "greater": ("input", "other"),
    "greater_equal": ("input", "other"),
    "less": ("input", "other"),
    "less_equal": ("input", "other"),
    "log_softmax": ("input", "dim"),
    "invert": ("input",),
    "masked_fill": ("input", "mask", "value"),
    "matmul": ("input", "other"),
    "max": ("input", "dim"),
    "mean": ("input", "dim"),
    "mul": ("input", "other"),
    "multinomial": ("input", "num_samples"),
    "argmax": ("input", "dim"),
    "negative": ("input",),
    "normalize": ("input", "p", "dim"),
    "not_equal": ("input", "other"),
    "ones": ("*size",),
    "ones_like": ("input",),
    "permute": ("input", "*dims"),
    "pow": ("input", "other"),
    "rearrange": ("input", "pattern"),
    "repeat": ("input", "*sizes"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "reshape": ("input", "*shape"),
    "rsqrt": ("input",),
    "sdpa": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    "flex": ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa"),
    "block_mask": ("mask_mod", "B", "H", "Q_LEN", "KV_LEN"),
    "size": ("input", "dim"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
    "split": ("input", "split_size", "dim"),
    "sqrt": ("input",),
    "squeeze": ("input", "dim"),
    "stack": ("tensors", "dim"),
    "sub": ("input", "other"),
    "subsequent_mask": ("size",),
    "sum": ("input", "dim"),
    "tanh": ("input",),
    "transpose": ("input", "dim0", "dim1"),
    "tril": ("input", "diagonal"),
    "triu": ("input", "diagonal"),
    "unbind": ("input", "dim"),
    "unflatten": ("input", "dim", "sizes"),
    "unsqueeze": ("input", "dim"),
    "where": ("condition", "input", "other"),
    "zeros": ("*size",),
    "zeros_like": ("input",),
}
"""Parameter names of each operation, the tensor first; one that begins with `*` takes the rest as `Term.items`."""

_TORCH = {
    **{name: name for name in ("add", "arange", "cat", "chunk", "clamp", "div", "exp", "flatten", "full", "full_like")},
    **{name: name for name in ("masked_fill", "matmul", "max", "mean", "mul", "ones", "ones_like", "permute", "pow")},
    **{
        name: name for name in ("repeat_interleave", "reshape", "rsqrt", "softmax", "split", "sqrt", "squeeze", "stack")
    },
    **{name: name for name in ("sub", "sum", "tanh", "transpose", "tril", "triu", "unbind", "unsqueeze", "where")},
    "unflatten": "unflatten",
    **{name: name for name in ("zeros", "zeros_like", "argmax", "multinomial", "log_softmax", "einsum")},
    "bmm": "matmul",
    "mm": "matmul",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "tile": "repeat",
    "logical_not": "invert",
    "bitwise_not": "invert",
    "neg": "negative",
    "eq": "equal",
    "ne": "not_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "less",
    "le": "less_equal",
    "not_equal": "not_equal",
}
"""Functions of the module torch (and, by the same name, of NumPy) and the operation of each."""

FUNCTIONS: dict[str, str] = {
    **{f"torch.{name}": op for name, op in _TORCH.items()},
    **{f"numpy.{name}": op for name, op in _TORCH.items()},
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
    "bool": "bool",
    "clone": "contiguous",
    "contiguous": "contiguous",
    "detach": "contiguous",
    "expand": "expand",
    "repeat": "repeat",
    "size": "size",
    "view": "reshape",
}
"""The operation of each method of a tensor."""

CASTS = {"float": "torch.float32", "half": "torch.float16", "bfloat16": "torch.bfloat16", "double": "torch.float64"}
"""Methods that convert a tensor, and the dtype that each converts to."""

FORWARD: dict[str, tuple[str, ...]] = {
    "torch.nn.MultiheadAttention": (
        *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights"),
        "is_causal",
    ),
    "torch.nn.TransformerEncoder": ("src", "mask", "src_key_padding_mask", "is_causal"),
    "torch.nn.TransformerEncoderLayer": ("src", "src_mask", "src_key_padding_mask", "is_causal"),
    "torch.nn.TransformerDecoder": (
        *("tgt", "memory", "tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask"),
        *("tgt_is_causal", "memory_is_causal"),
    ),
    "torch.nn.TransformerDecoderLayer": (
        *("tgt", "memory", "tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask"),
        *("tgt_is_causal", "memory_is_causal"),
    ),
    "torch.nn.Transformer": (
        *("src", "tgt", "src_mask", "tgt_mask", "memory_mask", "src_key_padding_mask", "tgt_key_padding_mask"),
        *("memory_key_padding_mask", "src_is_causal", "tgt_is_causal", "memory_is_causal"),
    ),
    "torch.nn.Softmax": ("input",),
    "torch.nn.Dropout": ("input",),
}
"""Parameter names of `forward` of the modules of torch that compute attention, or part of it."""

CONSTRUCTORS: dict[str, tuple[str, ...]] = {
    "torch.nn.MultiheadAttention": (
        *("embed_dim", "num_heads", "dropout", "bias", "add_bias_kv", "add_zero_attn", "kdim", "vdim", "batch_first"),
    ),
    "torch.nn.TransformerEncoder": ("encoder_layer", "num_layers"),
    "torch.nn.TransformerDecoder": ("decoder_layer", "num_layers"),
    "torch.nn.TransformerEncoderLayer": (
        *("d_model", "nhead", "dim_feedforward", "dropout", "activation", "layer_norm_eps", "batch_first"),
    ),
    "torch.nn.TransformerDecoderLayer": (
        *("d_model", "nhead", "dim_feedforward", "dropout", "activation", "layer_norm_eps", "batch_first"),
    ),
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
