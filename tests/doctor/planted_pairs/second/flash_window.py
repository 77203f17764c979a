from torch import nn

from flash_attn import flash_attn_func


class SlidingWindowAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.sliding_window = config.sliding_window
        self.attention_dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, rotary):
        bsz, q_len, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim)
        key = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)
        value = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)
        query, key = rotary(query, key)

        flash_kwargs = {}
        if self.sliding_window is not None and q_len > self.sliding_window:
            flash_kwargs["window_size"] = (self.sliding_window, self.sliding_window)
        out = flash_attn_func(
            query,
            key,
            value,
            dropout_p=self.attention_dropout if self.training else 0.0,
            causal=True,
            **flash_kwargs,
        )
        return self.o_proj(out.reshape(bsz, q_len, -1))
