import tensorflow as tf
from tensorflow.keras import layers


class FoldedHeads(layers.Layer):
    """Multi-head attention with the heads folded into the batch axis."""

    def __init__(self, n_head, d_model, dropout=0.1):
        super().__init__()
        self.n_head = n_head
        self.d_k = d_model // n_head
        self.qs, self.ks, self.vs = (layers.Dense(d_model, use_bias=False) for _ in range(3))
        self.out = layers.Dense(d_model)
        self.dropout = layers.Dropout(dropout)

    def fold(self, x):
        s = tf.shape(x)
        x = tf.reshape(x, [s[0], s[1], self.n_head, self.d_k])
        x = tf.transpose(x, [2, 0, 1, 3])
        return tf.reshape(x, [-1, s[1], self.d_k])

    def call(self, q, k, v, mask=None, training=False):
        q, k, v = self.fold(self.qs(q)), self.fold(self.ks(k)), self.fold(self.vs(v))
        scores = tf.matmul(q, k, transpose_b=True) / self.d_k ** 0.5
        if mask is not None:
            mask = tf.repeat(mask, self.n_head, axis=0)
            scores += (1.0 - tf.cast(mask, scores.dtype)) * -1e9
        weights = self.dropout(tf.nn.softmax(scores, axis=-1), training=training)
        x = tf.matmul(weights, v)
        s = tf.shape(x)
        x = tf.reshape(x, [self.n_head, -1, s[1], self.d_k])
        x = tf.transpose(x, [1, 2, 0, 3])
        return self.out(tf.reshape(x, [-1, s[1], self.n_head * self.d_k]))
