import jax.numpy as jnp
from flax import linen as nn


class DecoderLayer(nn.Module):
    heads: int
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, mask, *, deterministic):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            num_heads=self.heads, dropout_rate=self.dropout, deterministic=deterministic
        )(y, y, mask=mask)
        x = x + nn.Dropout(self.dropout, deterministic=deterministic)(y)
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class LanguageModel(nn.Module):
    vocab: int
    dim: int = 128
    heads: int = 4
    depth: int = 2
    pad_id: int = 0

    @nn.compact
    def __call__(self, ids, *, deterministic=True):
        real = ids != self.pad_id
        causal = nn.make_causal_mask(ids, dtype=bool)
        padding = nn.make_attention_mask(real, real, dtype=bool)
        mask = jnp.logical_or(causal, padding)
        x = nn.Embed(self.vocab, self.dim)(ids)
        x = x + nn.Embed(1024, self.dim)(jnp.arange(ids.shape[1]))
        for _ in range(self.depth):
            x = DecoderLayer(self.heads)(x, mask, deterministic=deterministic)
        return nn.Dense(self.vocab)(nn.LayerNorm()(x))
