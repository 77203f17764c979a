import keras
from keras import layers


class CausalMixer(layers.Layer):
    def __init__(self, d_model, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.mha = layers.MultiHeadAttention(num_heads, d_model // num_heads)

    def call(self, x, mask=None, use_causal_mask=False):
        return self.mha(x, x, attention_mask=mask, use_causal_mask=False)


class DecoderBlock(layers.Layer):
    def __init__(self, d_model, num_heads, ff_dim, dropout=0.1, **kwargs):
        super().__init__(**kwargs)
        self.mixer = CausalMixer(d_model, num_heads)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="gelu"), layers.Dense(d_model)])
        self.norm1 = layers.LayerNormalization(epsilon=1e-6)
        self.norm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout = layers.Dropout(dropout)

    def call(self, x, training=False):
        y = self.mixer(self.norm1(x), use_causal_mask=True)
        x = x + self.dropout(y, training=training)
        return x + self.dropout(self.ffn(self.norm2(x)), training=training)


def language_model(vocab, length, d_model=128, num_heads=4, depth=2):
    ids = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocab, d_model)(ids)
    x = x + layers.Embedding(length, d_model)(keras.ops.arange(length))
    for _ in range(depth):
        x = DecoderBlock(d_model, num_heads, 4 * d_model)(x)
    return keras.Model(ids, layers.Dense(vocab)(x))
