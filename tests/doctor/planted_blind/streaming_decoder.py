"""A decoder that keeps its keys and values between calls, in the style of an inference engine."""

from dataclasses import dataclass, field
from typing import List, Optional, Tuple

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class LayerState:
    keys: Optional[torch.Tensor] = None
    values: Optional[torch.Tensor] = None

    def append(self, keys, values):
        if self.keys is None:
            self.keys, self.values = keys, values
        else:
            self.keys = torch.cat((self.keys, keys), dim=-2)
            self.values = torch.cat((self.values, values), dim=-2)
        return self.keys, self.values


@dataclass
class State:
    layers: List[LayerState] = field(default_factory=list)


class SelfAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size = hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * num_kv_heads) * self.head_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def project(self, x):
        sizes = [self.num_heads * self.head_size, self.num_kv_heads * self.head_size, self.num_kv_heads * self.head_size]
        parts = self.qkv(x).split(sizes, dim=-1)
        return [part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts]

    def forward(self, x, state: LayerState):
        q, k, v = self.project(x)
        k, v = state.append(k, v)
        groups = self.num_heads // self.num_kv_heads
        k = k[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
        v = v[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class RotatingAttention(SelfAttention):
    """Rotary positions, counted for each call."""

    def rotate(self, x, angles):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)

    def forward(self, x, state: LayerState):
        q, k, v = self.project(x)
        frequencies = 10000 ** (-torch.arange(0, self.head_size, 2, device=x.device) / self.head_size)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * frequencies
        q, k, v = self.rotate(q, angles), self.rotate(k, angles), self.rotate(v, angles)
        past = 0 if state.keys is None else state.keys.shape[-2]
        k, v = state.append(k, v)
        total = k.shape[-2]
        visible = torch.arange(total, device=x.device) <= torch.arange(past, total, device=x.device)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@torch.no_grad()
def complete(model: nn.Module, prompt: torch.Tensor, count: int) -> torch.Tensor:
    text = prompt
    while text.shape[1] < prompt.shape[1] + count:
        scores = model(text)[:, -1, :]
        choice = torch.distributions.Categorical(logits=scores).sample()
        text = torch.hstack((text, choice[:, None]))
    return text


def tokenized(tokenizer, texts) -> Tuple[torch.Tensor, torch.Tensor]:
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    return batch.input_ids, batch.attention_mask


def answers(model, tokenizer, texts):
    input_ids, _ = tokenized(tokenizer, texts)
    generated = model.generate(input_ids, max_new_tokens=64)
    return tokenizer.batch_decode(generated)
