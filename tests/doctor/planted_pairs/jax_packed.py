"""A decoder over packed documents, in JAX."""

import jax
import jax.numpy as jnp


def layer(params, x, segments):
    """x (batch, length, width) is trained to predict the next token; segments (batch, length)."""
    q, k, v = (jnp.einsum("btw,wnh->btnh", x, params[name]) for name in ("q", "k", "v"))
    same = segments[:, None, :, None] != segments[:, None, None, :]
    read = jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)
    return x + jnp.einsum("btnh,nhw->btw", read, params["o"])
