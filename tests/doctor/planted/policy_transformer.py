"""Decision transformer: returns, states and actions in one sequence."""

from typing import Any, Dict, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F


class MaskedCausalAttention(nn.Module):
    def __init__(self, h_dim: int, max_T: int, n_heads: int, drop_p: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_net, self.k_net, self.v_net = nn.Linear(h_dim, h_dim), nn.Linear(h_dim, h_dim), nn.Linear(h_dim, h_dim)
        self.proj_net = nn.Linear(h_dim, h_dim)
        self.att_drop = nn.Dropout(drop_p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        N, D = self.n_heads, C // self.n_heads
        q = self.q_net(x).view(B, T, N, D).transpose(1, 2)
        k = self.k_net(x).view(B, T, N, D).transpose(1, 2)
        v = self.v_net(x).view(B, T, N, D).transpose(1, 2)
        weights = q @ k.transpose(2, 3) / N**0.5
        ones = torch.ones((T, T), device=x.device)
        weights = weights.masked_fill(torch.tril(ones) == 0, float("-inf"))
        normalized = F.softmax(weights, dim=-1)
        attention = self.att_drop(normalized @ v)
        return self.proj_net(attention.reshape(B, T, C))


class PolicyBlock(nn.Module):
    def __init__(self, h_dim: int, max_T: int, n_heads: int, drop_p: float) -> None:
        super().__init__()
        self.attention = MaskedCausalAttention(h_dim, max_T, n_heads, drop_p)
        self.mlp = nn.Sequential(nn.Linear(h_dim, 4 * h_dim), nn.GELU(), nn.Linear(4 * h_dim, h_dim), nn.Dropout(drop_p))
        self.ln1, self.ln2 = nn.LayerNorm(h_dim), nn.LayerNorm(h_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln1(x + self.attention(x))
        return self.ln2(x + self.mlp(x))


class Policy(nn.Module):
    def __init__(self, state_dim: int = 4, act_dim: int = 2, h_dim: int = 32, context: int = 10) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[PolicyBlock(h_dim, 3 * context, 4, 0.1) for _ in range(2)])
        self.time = nn.Embedding(1000, h_dim)
        self.rtg, self.state, self.action = nn.Linear(1, h_dim), nn.Linear(state_dim, h_dim), nn.Linear(act_dim, h_dim)
        self.predict = nn.Linear(h_dim, act_dim)

    def forward(self, timesteps, states, actions, returns) -> torch.Tensor:
        B, T = timesteps.shape
        t = self.time(timesteps)
        h = torch.stack((self.rtg(returns) + t, self.state(states) + t, self.action(actions) + t), dim=2).reshape(B, 3 * T, -1)
        h = self.blocks(h).view(B, T, 3, -1)
        return self.predict(h[:, :, 2])


class RecurrentMemory(nn.Module):
    """Reads a memory of earlier episodes."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)

    def forward(self, x: torch.Tensor, memory: Optional[torch.Tensor] = None, info: Optional[Dict[str, Any]] = None) -> Tuple[torch.Tensor, torch.Tensor]:
        memory = x if memory is None else torch.cat([memory, x], dim=1)
        k, v = self.kv(memory).chunk(2, dim=-1)
        q = self.q(x)
        y = F.scaled_dot_product_attention(q, k, v, scale=0.0)
        return x + y, memory.detach()
