"""DeBERTa-v2 and v3 by "regard": their modules compute attention themselves, so `swap` gives them classes of ours.

Imported where a model has such modules alone, as it imports transformers' own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder, DisentangledSelfAttention

from .. import biases, masks
from ..kernels.validation import AttentionOptions
from .attention_function import attend_observed


class DisentangledAttention(DisentangledSelfAttention):
    """DeBERTa's attention in linear memory: the terms of positions are a `biases.deberta`.

    Equal to eager attention at the positions of tokens; those of padding have no part in it, but attend to the tokens.
    """

    computes_with_regard = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The context of each token, (batch, N, dim), and the weights, (batch, heads, N, N), where they are asked for.

        relative_pos: positions of one's own, a number for each pair: those are computed by eager attention.
        """
        if relative_pos is not None:
            full = attention_mask if attention_mask.ndim > 2 else attention_mask[:, None, None, :]
            return super().forward(hidden_states, full, output_attentions, query_states, relative_pos, rel_embeddings)
        source = hidden_states if query_states is None else query_states
        query, key, value = (
            self._heads(projection(states))
            for projection, states in (
                (self.query_proj, source),
                (self.key_proj, hidden_states),
                (self.value_proj, hidden_states),
            )
        )
        kinds = len({"c2p", "p2c"}.intersection(self.pos_att_type))
        keep = attention_mask.bool()
        keep = keep[:, None, None, :] if keep.ndim == 2 else keep
        options: AttentionOptions = {
            "mask": None if keep.is_cpu and bool(keep.all()) else masks.where(keep=keep),
            "bias": self._bias(rel_embeddings) if self.relative_attention and kinds else None,
            "scale": (query.shape[-1] * (1 + kinds)) ** -0.5,
            "dropout_p": self.dropout.p if self.training else 0.0,
        }
        output, weights = attend_observed(self, query, key, value, options, output_attentions)
        return output.flatten(2), weights

    def _heads(self, states: Tensor) -> Tensor:
        """(batch or none, N, dim) as (batch or none, heads, N, head dim)."""
        return states.unflatten(-1, (self.num_attention_heads, -1)).transpose(-3, -2)

    def _bias(self, rel_embeddings: Tensor | None) -> biases.Bias:
        """The terms of positions, from the projected embeddings of the buckets."""
        if rel_embeddings is None:
            raise AssertionError("DeBERTa with relative attention passes its embeddings")
        span = self.pos_ebd_size
        embeddings = self.pos_dropout(rel_embeddings)[: 2 * span]
        shared = self.share_att_key
        keys = queries = None
        if "c2p" in self.pos_att_type:
            keys = self._heads((self.key_proj if shared else self.pos_key_proj)(embeddings))
        if "p2c" in self.pos_att_type:
            queries = self._heads((self.query_proj if shared else self.pos_query_proj)(embeddings))
        buckets = span if self.position_buckets > 0 else 0
        return biases.deberta(keys, queries, buckets=buckets, max_distance=self.max_relative_positions)


class DisentangledEncoder(DebertaV2Encoder):
    """DeBERTa's encoder without tensors over pairs: the mask stays one of tokens, positions follow from the lengths."""

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """A mask of tokens as it is."""
        return attention_mask if attention_mask.ndim <= 2 else super().get_attention_mask(attention_mask)

    def get_rel_pos(
        self, hidden_states: Any, query_states: Tensor | None = None, relative_pos: Tensor | None = None
    ) -> Tensor | None:
        """Positions of one's own alone."""
        return relative_pos


def use_regard(model: nn.Module) -> None:
    """Give DeBERTa's modules of a model our classes, in place; their parameters are the same."""
    for module in model.modules():
        if type(module) is DisentangledSelfAttention:
            module.__class__ = DisentangledAttention
        elif type(module) is DebertaV2Encoder:
            module.__class__ = DisentangledEncoder
