"""config.json, setting by setting: what is read is remembered, and what nobody has read is not passed over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ....errors import CheckpointError

# Settings of transformers that say nothing of what a model computes from tokens: where it came from, how it was
# initialised and trained, what its tokenizer marks, what a call returns.
HARMLESS = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "_sliding_window_pattern",
    "architectures",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initial_context_length",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


# Switches that are off in every architecture known here, or say nothing of what a model computes. Another one that is
# off may be on by default, and then off changes the result.
OFF_BY_DEFAULT = {
    "add_cross_attention",
    "do_sample",
    "is_decoder",
    "mlp_bias",
    "output_scores",
    "qkv_bias",
    "remove_invalid_values",
    "return_dict_in_generate",
    "rope_interleaved",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "torchscript",
    "use_bfloat16",
    "use_bidirectional_attention",
    "use_mrope",
    "use_qk_norm",
    "use_sliding_window",
}


class Settings:
    """The settings of a checkpoint, and below them the defaults of its architecture."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.given, self.defaults = given, defaults
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or the default of the architecture, or this one."""
        self.read.add(name)
        return self.given.get(name, self.defaults.get(name, default))

    def need(self, name: str) -> Any:
        """A setting that has to be there.

        Raises:
            CheckpointError: it is not.
        """
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"config.json says nothing of {name!r}, which a {self.model_type} model needs")
        return value

    def only(self, name: str, *supported: Any, default: Any = None) -> Any:
        """A setting of which some values alone are supported.

        Raises:
            CheckpointError: it has another one.
        """
        value = self.get(name, default)
        if value not in supported:
            some = ", ".join(repr(other) for other in supported)
            raise CheckpointError(
                f"config.json says {name}={value!r}, which changes what the model computes and is not supported here; "
                f"supported: {some}"
            )
        return value

    def check_all_read(self, ignore: Collection[str]) -> None:
        """Refuse settings that nobody has read, and that say something: not None, nor a known switch that is off.

        Raises:
            CheckpointError: there are some.
        """
        unread = self.given.keys() - self.read - HARMLESS - set(ignore)
        off = {name for name in unread & OFF_BY_DEFAULT if self.given[name] is False}
        unknown = sorted(name for name in unread - off if self.given[name] is not None)
        if unknown:
            said = ", ".join(f"{name}={self.given[name]!r}" for name in unknown)
            raise CheckpointError(
                f"config.json has {len(unknown)} settings that are unknown here for a {self.model_type} model, and may "
                f"change what it computes: {said}. Name those that change nothing in ignore={tuple(unknown)}"
            )

    @property
    def model_type(self) -> str:
        """What the checkpoint calls its architecture."""
        return str(self.given.get("model_type"))
