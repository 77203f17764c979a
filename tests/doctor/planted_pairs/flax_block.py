"""A block in Flax."""

import flax.linen as nn
import jax.numpy as jnp


class Block(nn.Module):
    dim: int
    heads: int

    @nn.compact
    def __call__(self, x, padding):
        size = self.dim // self.heads
        q = nn.DenseGeneral((self.heads, size))(x)
        k = nn.DenseGeneral((self.heads, size))(x)
        v = nn.DenseGeneral((self.heads, size))(x)
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k) * size**-0.5
        scores = jnp.where(padding[:, None, None, :], -1e9, scores)
        weights = nn.softmax(scores, axis=-2)
        mixed = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        return x + nn.DenseGeneral(self.dim, axis=(-2, -1))(mixed)
