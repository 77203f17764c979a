"""JAX, Flax, Keras and TensorFlow: each kind of mistake in three spellings is found, and its right twin is clean."""

import inspect

import pytest

from regard_doctor import RuleSelection, Severity, diagnose
from regard_doctor.array_frameworks import framework_of
from regard_doctor.rules import RULES

MISTAKES = RuleSelection(least=Severity.WARNING)
JAX, FLAX = "import jax\nimport jax.numpy as jnp\n", "import flax.linen as nn\nimport jax\nimport jax.numpy as jnp\n"
TF, KERAS = "import tensorflow as tf\n", "import keras\nfrom keras import layers, ops\n"
NNX = "from flax import nnx\nimport jax.numpy as jnp\n"
CASES = {
    # numbers that are added at words
    "tensorflow: a bias at words": (
        "ATT208",
        TF,
        """
        def attention(q, k, v, tokens):
            words = tf.cast(tf.not_equal(tokens, 0), tf.float32)[:, tf.newaxis, tf.newaxis, :]
            logits = tf.matmul(q, k, transpose_b=True) / tf.sqrt(tf.cast(tf.shape(k)[-1], tf.float32)) + words * -1e9
            return tf.matmul(tf.nn.softmax(logits), v)
        """,
        ("+ words *", "+ (1.0 - words) *"),
    ),
    # masks that are joined
    "flax: causal or words": (
        "ATT217",
        FLAX,
        """
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, tokens, pad_id):
                words = tokens != pad_id
                mask = nn.make_causal_mask(tokens) | nn.make_attention_mask(words, words)
                return nn.MultiHeadDotProductAttention(num_heads=4)(x, x, mask=mask)
        """,
        ("make_causal_mask(tokens) |", "make_causal_mask(tokens) &"),
    ),
    "keras: causal or words": (
        "ATT217",
        KERAS,
        """
        class Layer(layers.Layer):
            def __init__(self, dim):
                super().__init__()
                self.attention = layers.MultiHeadAttention(4, dim)

            def call(self, x, ids, pad_token_id):
                n = ops.shape(ids)[1]
                causal = ops.tril(ops.ones((n, n), dtype="bool"))
                mask = ops.logical_or(causal, ops.not_equal(ids, pad_token_id)[:, None, :])
                return self.attention(x, x, attention_mask=mask)
        """,
        ("logical_or", "logical_and"),
    ),
    # dropout between the softmax and the values
    "flax: axis of the queries, dropped out": (
        "ATT111",
        FLAX,
        """
        class Attention(nn.Module):
            heads: int
            rate: float

            @nn.compact
            def __call__(self, x, deterministic):
                q, k, v = (nn.DenseGeneral((self.heads, x.shape[-1] // self.heads))(x) for _ in range(3))
                scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
                w = nn.Dropout(self.rate)(jax.nn.softmax(scores, axis=-2), deterministic=deterministic)
                return jnp.einsum("bhqk,bkhd->bqhd", w, v)
        """,
        ("axis=-2", "axis=-1"),
    ),
    "keras: axis of the queries, dropped out": (
        "ATT111",
        KERAS,
        """
        class Attention(layers.Layer):
            def __init__(self, dim, rate):
                super().__init__()
                self.q, self.k, self.v = layers.Dense(dim), layers.Dense(dim), layers.Dense(dim)
                self.drop = layers.Dropout(rate)

            def call(self, x, training=None):
                q, k, v = self.q(x), self.k(x), self.v(x)
                s = ops.einsum("btd,bsd->bts", q, k) / ops.sqrt(ops.shape(q)[-1])
                w = self.drop(ops.softmax(s, axis=1), training=training)
                return ops.einsum("bts,bsd->btd", w, v)
        """,
        ("axis=1", "axis=-1"),
    ),
    "nnx: axis of the queries, dropped out": (
        "ATT111",
        NNX,
        """
        class Attention(nnx.Module):
            def __init__(self, dim, rngs):
                self.qkv, self.drop = nnx.Linear(dim, 3 * dim, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

            def __call__(self, x):
                q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
                weights = nnx.softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, axis=-2)
                return self.drop(weights) @ v
        """,
        ("axis=-2", "axis=-1"),
    ),
    # the order of rows of heads
    "tensorflow: a mask for each head of a row": (
        "ATT405",
        TF,
        """
        def attention(q, k, v, mask, heads):
            b, n, d = tf.unstack(tf.shape(q))

            def folded(x):
                x = tf.transpose(tf.reshape(x, [b, n, heads, d // heads]), [2, 0, 1, 3])
                return tf.reshape(x, [heads * b, n, d // heads])

            scores = tf.matmul(folded(q), folded(k), transpose_b=True) / tf.sqrt(tf.cast(d // heads, tf.float32))
            scores = tf.where(tf.repeat(mask, heads, axis=0), scores, -1e9)
            return tf.matmul(tf.nn.softmax(scores), folded(v))
        """,
        ("tf.repeat(mask, heads, axis=0)", "tf.tile(mask, [heads, 1, 1])"),
    ),
    "jax: a mask for all rows of a head": (
        "ATT405",
        JAX,
        """
        def attention(q, k, v, mask, num_heads):
            b, n, d = q.shape
            size = d // num_heads
            q, k, v = (
                x.reshape(b, n, num_heads, size).transpose(0, 2, 1, 3).reshape(b * num_heads, n, size)
                for x in (q, k, v)
            )
            logits = jnp.einsum("bqd,bkd->bqk", q, k) / jnp.sqrt(size)
            logits = jnp.where(jnp.tile(mask, (num_heads, 1, 1)), logits, -jnp.inf)
            return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(logits), v)
        """,
        ("jnp.tile(mask, (num_heads, 1, 1))", "jnp.repeat(mask, num_heads, axis=0)"),
    ),
    "keras: a mask for each head of a row": (
        "ATT405",
        KERAS,
        """
        class Folded(layers.Layer):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads, self.size = heads, dim // heads
                self.q, self.k, self.v = layers.Dense(dim), layers.Dense(dim), layers.Dense(dim)

            def rows(self, x):
                n = ops.shape(x)[1]
                x = ops.reshape(x, (-1, n, self.heads, self.size))
                return ops.reshape(ops.transpose(x, (2, 0, 1, 3)), (-1, n, self.size))

            def call(self, x, mask):
                q, k, v = self.rows(self.q(x)), self.rows(self.k(x)), self.rows(self.v(x))
                scores = ops.matmul(q, ops.transpose(k, (0, 2, 1))) / ops.sqrt(float(self.size))
                scores = ops.where(ops.repeat(mask, self.heads, axis=0), scores, -1e9)
                return ops.matmul(ops.softmax(scores, axis=-1), v)
        """,
        ("ops.repeat(mask, self.heads, axis=0)", "ops.tile(mask, (self.heads, 1, 1))"),
    ),
    # the scale
    "jax: multiplied by the root": (
        "ATT103",
        JAX,
        """
        def attention(q, k, v):
            d = q.shape[-1]
            logits = jnp.einsum("bhqd,bhkd->bhqk", q, k) * jnp.sqrt(d)
            return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(logits), v)
        """,
        ("* jnp.sqrt(d)", "/ jnp.sqrt(d)"),
    ),
    "tensorflow: divided by the size": (
        "ATT103",
        TF,
        """
        def attention(q, k, v):
            dk = tf.cast(tf.shape(k)[-1], tf.float32)
            logits = tf.matmul(q, k, transpose_b=True) / dk
            return tf.matmul(tf.nn.softmax(logits, axis=-1), v)
        """,
        ("/ dk", "/ tf.sqrt(dk)"),
    ),
    "keras: no scale of projections": (
        "ATT101",
        KERAS,
        """
        class Reader(layers.Layer):
            def __init__(self, dim):
                super().__init__()
                self.q, self.k, self.v = layers.Dense(dim), layers.Dense(dim), layers.Dense(dim)

            def call(self, x):
                q, k, v = self.q(x), self.k(x), self.v(x)
                scores = ops.matmul(q, ops.transpose(k, (0, 2, 1)))
                return ops.matmul(ops.softmax(scores, axis=-1), v)
        """,
        ("ops.transpose(k, (0, 2, 1)))", "ops.transpose(k, (0, 2, 1))) / ops.sqrt(ops.shape(q)[-1])"),
    ),
    "flax: scaled before a function that scales": (
        "ATT102",
        FLAX,
        """
        def attention(q, k, v):
            q = q / jnp.sqrt(q.shape[-1])
            return nn.dot_product_attention(q, k, v)
        """,
        ("q = q / jnp.sqrt(q.shape[-1])", "q = q.astype(jnp.float32)"),
    ),
    "flax: the width of all heads": (
        "ATT104",
        FLAX,
        """
        class Block(nn.Module):
            dim: int
            heads: int

            @nn.compact
            def __call__(self, x):
                b, n, _ = x.shape
                q = nn.Dense(self.dim)(x).reshape(b, n, self.heads, self.dim // self.heads).transpose(0, 2, 1, 3)
                k = nn.Dense(self.dim)(x).reshape(b, n, self.heads, self.dim // self.heads).transpose(0, 2, 1, 3)
                v = nn.Dense(self.dim)(x).reshape(b, n, self.heads, self.dim // self.heads).transpose(0, 2, 1, 3)
                weights = nn.softmax(q @ k.swapaxes(-1, -2) / self.dim ** 0.5)
                return (weights @ v).transpose(0, 2, 1, 3).reshape(b, n, self.dim)
        """,
        ("/ self.dim ** 0.5", "/ (self.dim // self.heads) ** 0.5"),
    ),
    # the axis of the softmax
    "jax: over the queries": (
        "ATT111",
        JAX,
        """
        def attention(q, k, v):
            scores = q @ jnp.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5
            return jax.nn.softmax(scores, axis=-2) @ v
        """,
        ("axis=-2", "axis=-1"),
    ),
    "tensorflow: over the heads": (
        "ATT111",
        TF,
        """
        def attention(q, k, v):
            scores = tf.einsum("bhqd,bhkd->bhqk", q, k) * tf.math.rsqrt(64.0)
            weights = tf.nn.softmax(scores, axis=1)
            return tf.einsum("bhqk,bhkd->bhqd", weights, v)
        """,
        ("axis=1", "axis=3"),
    ),
    "keras: a letter of another axis": (
        "ATT111",
        KERAS,
        """
        def attention(q, k, v):
            scores = ops.einsum("btnh,bsnh->bnts", q, k) / 8.0
            return ops.einsum("bnts,bsnh->btnh", ops.softmax(scores, axis=2), v)
        """,
        ("axis=2", "axis=-1"),
    ),
    # masks of booleans
    "jax: a triangle of the past": (
        "ATT201",
        JAX,
        """
        def attention(q, k, v):
            n = q.shape[1]
            mask = jnp.triu(jnp.ones((n, n), dtype=bool), k=1)
            return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])
        """,
        ("jnp.triu(jnp.ones((n, n), dtype=bool), k=1)", "jnp.tril(jnp.ones((n, n), dtype=bool))"),
    ),
    "jax: where, the wrong way about": (
        "ATT201",
        JAX,
        """
        def attention(q, k, v):
            logits = jnp.einsum("...qhd,...khd->...hqk", q, k) / jnp.sqrt(q.shape[-1])
            keep = jnp.tri(q.shape[-3], dtype=bool)
            logits = jnp.where(keep, -jnp.inf, logits)
            return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(logits, axis=-1), v)
        """,
        ("-jnp.inf, logits", "logits, -jnp.inf"),
    ),
    "keras: 1 where it hides": (
        "ATT201",
        TF,
        """
        def block(mha, x):
            n = tf.shape(x)[1]
            attend = tf.keras.layers.MultiHeadAttention(4, 32)
            hidden = 1 - tf.linalg.band_part(tf.ones((n, n)), -1, 0)
            return attend(x, x, attention_mask=hidden)
        """,
        ("hidden = 1 - tf", "hidden = tf"),
    ),
    "tensorflow: the upper band": (
        "ATT201",
        TF,
        """
        class Block(tf.keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.attend = tf.keras.layers.MultiHeadAttention(num_heads=2, key_dim=16)

            def call(self, x):
                seen = tf.linalg.band_part(tf.ones([tf.shape(x)[1], tf.shape(x)[1]]), 0, -1)
                return self.attend(query=x, value=x, attention_mask=tf.cast(seen, tf.bool))
        """,
        ("0, -1)", "-1, 0)"),
    ),
    "flax: a causal mask, inverted": (
        "ATT201",
        FLAX,
        """
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, tokens):
                mask = ~nn.make_causal_mask(tokens, dtype=bool)
                return nn.MultiHeadDotProductAttention(num_heads=8)(x, x, mask=mask)
        """,
        ("~nn", "nn"),
    ),
    "keras: the next position is shown": (
        "ATT215",
        KERAS,
        """
        def decode(layer, x):
            n = ops.shape(x)[1]
            attend = layers.MultiHeadAttention(num_heads=2, key_dim=8)
            seen = ops.tril(ops.ones((n, n)), k=1)
            return attend(x, x, attention_mask=seen)
        """,
        ("k=1", "k=0"),
    ),
    # padding
    "jax: padding is read": (
        "ATT208",
        JAX,
        """
        def attention(q, k, v, tokens, pad_id):
            is_pad = tokens == pad_id
            return jax.nn.dot_product_attention(q, k, v, mask=is_pad[:, None, None, :])
        """,
        ("tokens == pad_id", "tokens != pad_id"),
    ),
    "keras: padding is read": (
        "ATT208",
        KERAS,
        """
        class Encoder(keras.layers.Layer):
            def __init__(self, pad_id):
                super().__init__()
                self.pad_id = pad_id
                self.attend = layers.MultiHeadAttention(8, 64)

            def call(self, x, tokens):
                mask = ops.expand_dims(ops.equal(tokens, self.pad_id), 1)
                return self.attend(x, x, attention_mask=mask)
        """,
        ("ops.equal", "ops.not_equal"),
    ),
    "tensorflow: words are hidden": (
        "ATT208",
        TF,
        """
        def attention(q, k, v, tokens, pad_id):
            scores = tf.matmul(q, k, transpose_b=True) / tf.sqrt(64.0)
            words = tf.not_equal(tokens, pad_id)[:, tf.newaxis, :]
            scores = tf.where(words, -1e9, scores)
            return tf.matmul(tf.nn.softmax(scores), v)
        """,
        ("-1e9, scores", "scores, -1e9"),
    ),
    # masks that are added
    "tensorflow: a band of ones is added": (
        "ATT202",
        TF,
        """
        def attention(q, k, v):
            scores = tf.matmul(q, k, transpose_b=True) / tf.sqrt(64.0)
            n = tf.shape(scores)[-1]
            scores += tf.linalg.band_part(tf.ones((n, n)), -1, 0)
            return tf.matmul(tf.nn.softmax(scores), v)
        """,
        (
            "+= tf.linalg.band_part(tf.ones((n, n)), -1, 0)",
            "+= (1 - tf.linalg.band_part(tf.ones((n, n)), -1, 0)) * -1e9",
        ),
    ),
    "tensorflow: the past gets the large number": (
        "ATT201",
        TF,
        """
        def attention(q, k, v):
            scores = tf.matmul(q, k, transpose_b=True) / tf.sqrt(64.0)
            n = tf.shape(scores)[-1]
            future = tf.linalg.band_part(tf.ones((n, n)), -1, 0) - tf.linalg.band_part(tf.ones((n, n)), 0, 0)
            scores += future * -1e9
            return tf.matmul(tf.nn.softmax(scores), v)
        """,
        ("tf.linalg.band_part(tf.ones((n, n)), -1, 0) -", "tf.linalg.band_part(tf.ones((n, n)), 0, -1) -"),
    ),
    "jax: a triangle of ones as bias": (
        "ATT202",
        JAX,
        """
        def attention(q, k, v):
            n = q.shape[1]
            return jax.nn.dot_product_attention(q, k, v, bias=jnp.tril(jnp.ones((n, n))))
        """,
        ("bias=jnp.tril(jnp.ones((n, n)))", "is_causal=True"),
    ),
    "jax: scores times the mask": (
        "ATT206",
        JAX,
        """
        def attention(q, k, v):
            scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1])
            mask = jnp.tril(jnp.ones((q.shape[-2], k.shape[-2])))
            return jax.nn.softmax(scores * mask, axis=-1) @ v
        """,
        ("scores * mask", "jnp.where(mask == 0, -jnp.inf, scores)"),
    ),
    "keras: the mask after the softmax": (
        "ATT207",
        KERAS,
        """
        def attention(q, k, v):
            scores = ops.matmul(q, ops.swapaxes(k, -1, -2)) / ops.sqrt(64.0)
            seen = ops.tril(ops.ones((ops.shape(q)[-2], ops.shape(k)[-2])))
            weights = ops.softmax(scores) * seen
            return ops.matmul(weights, v)
        """,
        ("ops.softmax(scores) * seen", "ops.softmax(ops.where(seen > 0, scores, -1e30))"),
    ),
    # options and documents
    "keras: use_causal_mask that never arrives": (
        "ATT252",
        KERAS,
        """
        class Wrapped(layers.Layer):
            def __init__(self):
                super().__init__()
                self.attend = layers.MultiHeadAttention(4, 16)

            def call(self, x, use_causal_mask=False):
                return self.attend(x, x, use_causal_mask=False)

        def decode(x):
            return Wrapped()(x, use_causal_mask=True)
        """,
        ("x, use_causal_mask=False)\n\n", "x, use_causal_mask=use_causal_mask)\n\n"),
    ),
    "flax: a mask that is not read": (
        "ATT252",
        FLAX,
        """
        class Wrapped(nn.Module):
            @nn.compact
            def __call__(self, x, mask):
                return nn.SelfAttention(num_heads=4)(x)

        def encode(params, x, tokens):
            return Wrapped().apply(params, x, mask=nn.make_attention_mask(tokens > 0, tokens > 0))
        """,
        ("(x)\n", "(x, mask=mask)\n"),
    ),
    "nnx: other documents": (
        "ATT220",
        NNX,
        """
        def packed(q, k, v, segment_ids):
            mask = segment_ids[:, None, :, None] != segment_ids[:, None, None, :]
            return nnx.dot_product_attention(q, k, v, mask=mask)
        """,
        ("!=", "=="),
    ),
    # heads
    "jax: tiled heads": (
        "ATT403",
        JAX,
        """
        def attention(q, k, v, n_rep):
            k = jnp.tile(k, (1, n_rep, 1, 1))
            v = jnp.tile(v, (1, n_rep, 1, 1))
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
            return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), v)
        """,
        ("jnp.tile(k, (1, n_rep, 1, 1))", "jnp.repeat(k, n_rep, axis=1)"),
        ("jnp.tile(v, (1, n_rep, 1, 1))", "jnp.repeat(v, n_rep, axis=1)"),
    ),
    "tensorflow: tiled heads": (
        "ATT403",
        TF,
        """
        def attention(q, k, v, groups):
            k, v = tf.tile(k, [1, groups, 1, 1]), tf.tile(v, multiples=[1, groups, 1, 1])
            scores = tf.matmul(q, k, transpose_b=True) * 0.125
            return tf.matmul(tf.nn.softmax(scores, -1), v)
        """,
        ("tf.tile(k, [1, groups, 1, 1])", "tf.repeat(k, groups, axis=1)"),
        ("tf.tile(v, multiples=[1, groups, 1, 1])", "tf.repeat(v, groups, axis=1)"),
    ),
    "keras: tiled heads": (
        "ATT403",
        KERAS,
        """
        def attention(q, k, v, kv_groups):
            k = ops.tile(k, (1, 1, kv_groups, 1))
            v = ops.tile(v, (1, 1, kv_groups, 1))
            return ops.nn.dot_product_attention(q, k, v)
        """,
        ("ops.tile(k, (1, 1, kv_groups, 1))", "ops.repeat(k, kv_groups, axis=2)"),
        ("ops.tile(v, (1, 1, kv_groups, 1))", "ops.repeat(v, kv_groups, axis=2)"),
    ),
    "keras: heads split across positions": (
        "ATT401",
        KERAS,
        """
        class Reader(layers.Layer):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads, self.head_dim = heads, dim // heads
                self.q, self.k, self.v = layers.Dense(dim), layers.Dense(dim), layers.Dense(dim)

            def call(self, x):
                b, n, _ = ops.shape(x)
                q = ops.reshape(self.q(x), (b, self.heads, n, self.head_dim))
                k = ops.reshape(self.k(x), (b, self.heads, n, self.head_dim))
                v = ops.reshape(self.v(x), (b, self.heads, n, self.head_dim))
                scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / ops.sqrt(self.head_dim)
                return ops.matmul(ops.softmax(scores), v)
        """,
        *((f"ops.reshape(self.{x}(x), (b, self.heads, n, self.head_dim))", f"self.split(self.{x}(x))") for x in "qkv"),
    ),
    "jax: heads first": (
        "ATT406",
        JAX,
        """
        def attention(q, k, v, heads):
            b, n, d = q.shape
            q, k, v = (x.reshape(b, n, heads, d // heads).transpose(0, 2, 1, 3) for x in (q, k, v))
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        """,
        (".transpose(0, 2, 1, 3)", ""),
    ),
    "keras: keys as values": (
        "ATT408",
        TF,
        """
        class Cross(tf.keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.attend = tf.keras.layers.MultiHeadAttention(2, 8)

            def call(self, q, k, v):
                return self.attend(q, k, v)
        """,
        ("(q, k, v)\n", "(q, value=v, key=k)\n"),
    ),
}


def sources(case: tuple) -> tuple[str, str]:
    _, imports, written, *mends = case
    wrong = right = f"{imports}\n{inspect.cleandoc(written)}\n"
    for old, new in mends:
        assert old in right
        head, found, tail = right.rpartition(old)
        right = head + new + tail if found else right
    return wrong, right


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found_and_its_right_twin_is_clean(name: str) -> None:
    wrong, right = sources(CASES[name])
    assert {one.code for one in diagnose(wrong, selection=MISTAKES)} == {CASES[name][0]}
    assert diagnose(right, selection=MISTAKES) == []


def test_each_kind_has_three_spellings() -> None:
    kinds = {"scale": ("ATT10",), "axis": ("ATT111",), "booleans": ("ATT201", "ATT215"), "padding": ("ATT208",)}
    kinds |= {"added": ("ATT202", "ATT206", "ATT207"), "options": ("ATT252", "ATT220"), "groups": ("ATT403",)}
    for codes in kinds.values():
        assert sum(case[0].startswith(codes) for case in CASES.values()) >= 3


def test_files_of_torch_are_read_as_such() -> None:
    assert framework_of(["torch.nn", "jax"]) == ""
    assert framework_of(["numpy", "math"]) == ""
    assert framework_of(["tensorflow.keras.layers"]) == "tensorflow"
    assert any(rule.reads_arrays for rule in RULES.values())
    source = f"{JAX}def f(q, k, v):\n    return jax.nn.softmax(q @ k.T / 8.0) @ v\n"
    assert diagnose(source) == []  # a textbook formula is no advice for JAX
