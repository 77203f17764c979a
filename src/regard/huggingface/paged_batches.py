"""Continuous batching of transformers, `generate_batch`, with attention by regard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, starmap
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigurationError, require
from .attention_function import attention_forward
from .register import NAME, swap

PAGED = "paged|eager"
"""The name of the one implementation that transformers' continuous batching takes and that is no kernel of others."""
OF_BATCH = (
    *("block_table", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "logits_indices", "logits_processor_args"),
    *("max_length_k", "max_length_q", "read_index", "write_index"),
)
"""Keywords of continuous batching: where sequences begin, and where their keys are; the mask has the rest."""


@contextmanager
def paged(model: nn.Module) -> Iterator[None]:
    """Let `model.generate_batch` and its managers compute attention by regard, within a `with` block.

    transformers takes few implementations by name for continuous batching; within the block its "paged|eager" is
    regard's attention for this model, and what it was for all others. Tokens are those of `generate` with eager
    attention, also with windows, sinks, and softcap, which transformers' own leaves out. Outside the block the model
    uses what it used before; it has to be one that `swap` has, or would, give "regard".

    Raises:
        ConfigurationError: a model that cannot use "regard", as `swap` reports it.
        MissingExtra: transformers is not installed.

    >>> import torch, regard.huggingface
    >>> from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes))
    >>> settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    >>> small = ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=16)
    >>> with regard.huggingface.paged(model):
    ...     answers = model.generate_batch([[1, 2, 3], [4]], settings, small, progress_bar=False)
    >>> [len(answer.generated_tokens) for answer in answers.values()]
    [3, 3]
    """
    modeling = require("transformers.modeling_utils", extra="huggingface")
    functions, before = modeling.ALL_ATTENTION_FUNCTIONS, _implementation(model)
    report = swap(model)
    try:
        if report.skipped or not report.replaced:
            raise ConfigurationError(f"the batches of this model cannot be computed by {NAME!r}: {report}")
        model.set_attn_implementation(PAGED)  # type: ignore[operator]  # `swap` took it for a PreTrainedModel
        others = functions[PAGED]
        functions[PAGED] = _for_modules(set(model.modules()), others)
        try:
            yield
        finally:
            functions[PAGED] = others
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]


def _implementation(model: nn.Module) -> str:
    """The implementation that a model has.

    Raises:
        ConfigurationError: it is none of transformers that generates batches.
    """
    if not hasattr(model, "generate_batch"):
        raise ConfigurationError(
            f"paged needs a model of transformers that has generate_batch; this is a {type(model).__name__}"
        )
    return model.config._attn_implementation  # type: ignore[union-attr]


def _for_modules(modules: set[nn.Module], others: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function of some modules; of all others the one that was there."""

    def choose(module: nn.Module, *tensors: Tensor, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        return (paged_attention_forward if module in modules else others)(module, *tensors, **keywords)

    return choose


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    cache: Any = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention of the tokens of several sequences, one after another, each to its own keys in the cache.

    Shapes: query (1, heads, T, D), key and value (1, key heads, T, ·), the T tokens of a step; attention_mask (1, 1, T,
    N) with the N keys of all sequences; output (1, T, heads, Dv).

    Raises:
        ConfigurationError: there is no cache; an unknown keyword, as `attention_forward`.
    """
    if cache is None:
        raise ConfigurationError(
            f"{PAGED!r} is for continuous batching, which passes a cache: call the model outside the block of paged"
        )
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=keywords)
    row_ends, key_ends = (keywords[name].tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    plain = {name: value for name, value in keywords.items() if name not in OF_BATCH}
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    for rows, columns in zip(starmap(slice, pairwise(row_ends)), starmap(slice, pairwise(key_ends)), strict=False):
        if rows.start < rows.stop:
            own = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            output[:, rows], _ = attention_forward(module, *own, attention_mask[..., rows, columns], **plain)
    return output, None
