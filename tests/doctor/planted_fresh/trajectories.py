"""Reinforcement learning as the modelling of sequences: return, state, action, return, state, action, ..."""

import torch
import torch.nn as nn


class MaskedCausalAttention(nn.Module):
    def __init__(self, h_dim, n_heads, max_T):
        super().__init__()
        self.n_heads = n_heads
        self.q_net = nn.Linear(h_dim, h_dim)
        self.k_net = nn.Linear(h_dim, h_dim)
        self.v_net = nn.Linear(h_dim, h_dim)
        self.proj_net = nn.Linear(h_dim, h_dim)
        self.max_T = max_T

    def forward(self, x, attention_mask=None):
        B, T, C = x.shape
        N, D = self.n_heads, C // self.n_heads
        q = self.q_net(x).view(B, T, N, D).transpose(1, 2)
        k = self.k_net(x).view(B, T, N, D).transpose(1, 2)
        v = self.v_net(x).view(B, T, N, D).transpose(1, 2)
        weights = q @ k.transpose(2, 3) / D**0.5
        causal = torch.ones(T, T, device=x.device).tril().view(1, 1, T, T)
        weights = weights.masked_fill(causal == 0, float("-inf"))
        if attention_mask is not None:
            weights = weights + attention_mask[:, None, None, :].to(weights.dtype) * -1e9
        attention = torch.softmax(weights, dim=-1) @ v
        return self.proj_net(attention.transpose(1, 2).contiguous().view(B, T, N * D))


class Block(nn.Module):
    def __init__(self, h_dim, max_T, n_heads):
        super().__init__()
        self.attention = MaskedCausalAttention(h_dim, n_heads, max_T)
        self.mlp = nn.Sequential(nn.Linear(h_dim, 4 * h_dim), nn.GELU(), nn.Linear(4 * h_dim, h_dim))
        self.ln1, self.ln2 = nn.LayerNorm(h_dim), nn.LayerNorm(h_dim)

    def forward(self, x, attention_mask=None):
        x = x + self.attention(self.ln1(x), attention_mask)
        return x + self.mlp(self.ln2(x))


class DecisionTransformer(nn.Module):
    def __init__(self, state_dim=6, act_dim=3, n_blocks=2, h_dim=32, context_len=64, n_heads=4):
        super().__init__()
        self.blocks = nn.ModuleList([Block(h_dim, 3 * context_len, n_heads) for _ in range(n_blocks)])
        self.embed_timestep = nn.Embedding(256, h_dim)
        self.embed_rtg = nn.Linear(1, h_dim)
        self.embed_state = nn.Linear(state_dim, h_dim)
        self.embed_action = nn.Linear(act_dim, h_dim)
        self.predict_action = nn.Linear(h_dim, act_dim)
        self.h_dim = h_dim

    def forward(self, timesteps, states, actions, returns_to_go, attention_mask=None):
        B, T, _ = states.shape
        time = self.embed_timestep(timesteps)
        s = self.embed_state(states) + time
        a = self.embed_action(actions) + time
        r = self.embed_rtg(returns_to_go) + time
        h = torch.stack((r, s, a), dim=1).permute(0, 2, 1, 3).reshape(B, 3 * T, self.h_dim)
        if attention_mask is not None:
            attention_mask = torch.cat([attention_mask] * 3, dim=1)
        for block in self.blocks:
            h = block(h, attention_mask)
        h = h.reshape(B, T, 3, self.h_dim)
        return self.predict_action(h[:, :, 1])
