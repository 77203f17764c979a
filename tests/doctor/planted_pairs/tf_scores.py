"""Scaled dot products in TensorFlow."""

import tensorflow as tf


def attention(q, k, v, mask=None):
    """mask is 1 where a key is hidden."""
    product = tf.matmul(q, k, transpose_b=True)
    size = tf.cast(tf.shape(k)[-1], tf.float32)
    logits = product * tf.math.sqrt(size)
    if mask is not None:
        logits += mask * -1e9
    weights = tf.nn.softmax(logits, axis=-1)
    return tf.matmul(weights, v), weights
