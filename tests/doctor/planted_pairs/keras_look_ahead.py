"""A decoder layer in Keras."""

import tensorflow as tf


def look_ahead_mask(size):
    return 1 - tf.linalg.band_part(tf.ones((size, size)), -1, 0)


class DecoderLayer(tf.keras.layers.Layer):
    def __init__(self, d_model, num_heads, dff, rate=0.1):
        super().__init__()
        self.mha = tf.keras.layers.MultiHeadAttention(num_heads=num_heads, key_dim=d_model // num_heads)
        self.ffn = tf.keras.Sequential([tf.keras.layers.Dense(dff, activation="relu"), tf.keras.layers.Dense(d_model)])
        self.norm1 = tf.keras.layers.LayerNormalization()
        self.norm2 = tf.keras.layers.LayerNormalization()
        self.dropout = tf.keras.layers.Dropout(rate)

    def call(self, x, training=False):
        mask = look_ahead_mask(tf.shape(x)[1])
        read = self.mha(query=x, value=x, key=x, attention_mask=mask)
        x = self.norm1(x + self.dropout(read, training=training))
        return self.norm2(x + self.ffn(x))
