"""A layer around Keras' own attention."""

from tensorflow.keras import layers


class ProjectedAttention(layers.Layer):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.mha = layers.MultiHeadAttention(num_heads, d_model // num_heads)

    def call(self, x, mask=None, use_causal_mask=False):
        return self.mha(x, x, attention_mask=mask, use_causal_mask=False)


class Decoder(layers.Layer):
    def __init__(self, d_model, num_heads, n_layers):
        super().__init__()
        self.blocks = [ProjectedAttention(d_model, num_heads) for _ in range(n_layers)]
        self.norms = [layers.LayerNormalization() for _ in range(n_layers)]

    def call(self, x):
        for block, norm in zip(self.blocks, self.norms):
            x = norm(x + block(x, use_causal_mask=True))
        return x
