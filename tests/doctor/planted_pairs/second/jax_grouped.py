import jax
import jax.numpy as jnp


def grouped_attention(params, x, *, num_heads, num_kv_heads):
    """Causal grouped-query attention; x is (batch, length, model)."""
    batch, length, _ = x.shape
    head_dim = params["wq"].shape[-1] // num_heads
    q = (x @ params["wq"]).reshape(batch, length, num_heads, head_dim)
    k = (x @ params["wk"]).reshape(batch, length, num_kv_heads, head_dim)
    v = (x @ params["wv"]).reshape(batch, length, num_kv_heads, head_dim)

    reps = num_heads // num_kv_heads
    k = jnp.tile(k, (1, 1, reps, 1))
    v = jnp.tile(v, (1, 1, reps, 1))

    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(head_dim)
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    logits = jnp.where(causal[None, None], logits, jnp.finfo(logits.dtype).min)
    weights = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return out.reshape(batch, length, -1) @ params["wo"]
