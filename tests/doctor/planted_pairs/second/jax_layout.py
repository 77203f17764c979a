import jax
import jax.numpy as jnp
from flax import linen as nn


class SelfAttention(nn.Module):
    dim: int
    heads: int

    @nn.compact
    def __call__(self, x):
        batch, length, _ = x.shape
        qkv = nn.Dense(3 * self.dim, use_bias=False)(x)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        shape = (batch, length, self.heads, self.dim // self.heads)
        q, k, v = (t.reshape(shape).transpose(0, 2, 1, 3) for t in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(0, 2, 1, 3).reshape(batch, length, self.dim)
        return nn.Dense(self.dim, use_bias=False)(y)


class Block(nn.Module):
    dim: int
    heads: int

    @nn.compact
    def __call__(self, x):
        x = x + SelfAttention(self.dim, self.heads)(nn.RMSNorm()(x))
        h = nn.gelu(nn.Dense(4 * self.dim)(nn.RMSNorm()(x)))
        return x + nn.Dense(self.dim)(h)
