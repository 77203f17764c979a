"""Settings of the models of transformers that translate, which do not depend on the family of the model."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import CheckpointError
from ..language_model.huggingface.config_reader import ModelSettings

HARMLESS_SETTINGS = {
    "_num_labels",
    "activation_dropout",
    "attention_dropout",
    "classif_dropout",
    "classifier_dropout",
    "decoder_layerdrop",
    "dropout",
    "dropout_rate",
    "encoder_layerdrop",
    "finetuning_task",
    "gradient_checkpointing",
    "init_std",
    "initializer_factor",
    "num_hidden_layers",
    "num_labels",
    "output_past",
    "save_step",
    "task_specific_params",
    "tokenizer_class",
}
"""Those of training and of tokenizers."""
GENERATION = {
    "bad_words_ids",
    "decoder_start_token_id",
    "diversity_penalty",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "renormalize_logits",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
"""Those of generation, which older files have in config.json; `translation.pretrained_search` reads them."""


def size_of(settings: ModelSettings, name: str, default: int | None = None) -> int:
    """A setting that is a whole number of at least 1.

    Raises:
        CheckpointError: it is not, or is missing and has no default.
    """
    value = settings.need(name) if default is None else settings.get(name, default)
    if type(value) is not int or not 1 <= value < 2**26:
        raise CheckpointError(f"config.json says {name}={str(value)[:80]}; it needs a whole number in 1..{2**26 - 1:,}")
    return value


@dataclass(frozen=True)
class StackSizes:
    """The sizes of an encoder or a decoder."""

    layers: int
    heads: int
    hidden_dim: int

    @classmethod
    def read(cls, settings: ModelSettings, part: str) -> StackSizes:
        """Those of the "encoder" or "decoder" of a model that descends from BART.

        Raises:
            CheckpointError: a size that is missing or impossible.
        """
        return cls(*(size_of(settings, f"{part}_{name}") for name in ("layers", "attention_heads", "ffn_dim")))
