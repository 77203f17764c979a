import tensorflow as tf


def padding_mask(ids):
    """1.0 at padding, shaped to broadcast over heads and queries."""
    pad = tf.cast(tf.math.not_equal(ids, 0), tf.float32)
    return pad[:, tf.newaxis, tf.newaxis, :]


def attention(q, k, v, mask):
    logits = tf.matmul(q, k, transpose_b=True)
    logits = logits / tf.math.sqrt(tf.cast(tf.shape(k)[-1], tf.float32))
    if mask is not None:
        logits += mask * -1e9
    weights = tf.nn.softmax(logits, axis=-1)
    return tf.matmul(weights, v)


class Encoder(tf.keras.layers.Layer):
    def __init__(self, vocab, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.embedding = tf.keras.layers.Embedding(vocab, d_model)
        self.wq, self.wk, self.wv, self.wo = (tf.keras.layers.Dense(d_model) for _ in range(4))

    def heads(self, x):
        b, n = tf.shape(x)[0], tf.shape(x)[1]
        x = tf.reshape(x, (b, n, self.num_heads, x.shape[-1] // self.num_heads))
        return tf.transpose(x, perm=[0, 2, 1, 3])

    def call(self, ids):
        x = self.embedding(ids)
        y = attention(self.heads(self.wq(x)), self.heads(self.wk(x)), self.heads(self.wv(x)), padding_mask(ids))
        y = tf.transpose(y, perm=[0, 2, 1, 3])
        y = tf.reshape(y, (tf.shape(y)[0], tf.shape(y)[1], x.shape[-1]))
        return x + self.wo(y)
