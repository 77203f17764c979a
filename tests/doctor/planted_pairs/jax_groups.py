"""Attention with groups of heads, in JAX."""

import jax
import jax.numpy as jnp


def grouped_attention(q, k, v, causal=True):
    """q (batch, length, heads, dim); k, v (batch, length, kv_heads, dim)."""
    groups = q.shape[2] // k.shape[2]
    k = jnp.tile(k, (1, 1, groups, 1))
    v = jnp.tile(v, (1, 1, groups, 1))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    if causal:
        keep = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), dtype=bool))
        logits = jnp.where(keep, logits, jnp.finfo(logits.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, axis=-1), v)
