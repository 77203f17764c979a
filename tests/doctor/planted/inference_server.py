"""A tiny completion server: one model, one cache for each session."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Session:
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0


class ServingAttention(nn.Module):
    def __init__(self, dim: int, heads: int, index: int) -> None:
        super().__init__()
        self.heads, self.index = heads, index
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, session: Session) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if len(session.keys) > self.index:
            k = torch.cat([session.keys[self.index], k], dim=2)
            v = torch.cat([session.values[self.index], v], dim=2)
            session.keys[self.index], session.values[self.index] = k, v
        else:
            session.keys.append(k)
            session.values.append(v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


class ServedModel(nn.Module):
    def __init__(self, vocab: int = 256, dim: int = 64, heads: int = 4, depth: int = 2, max_len: int = 512) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList([ServingAttention(dim, heads, i) for i in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: torch.Tensor, session: Session) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tok(ids) + self.pos(positions)
        for block in self.blocks:
            x = x + block(x, session)
        return self.head(self.norm(x))


class CompletionServer:
    def __init__(self, model: ServedModel) -> None:
        self.model = model.eval()
        self.sessions: dict[str, Session] = {}

    @torch.inference_mode()
    def complete(self, name: str, prompt: list[int], new_tokens: int = 16) -> list[int]:
        session = self.sessions.setdefault(name, Session())
        logits = self.model(torch.tensor([prompt]), session)
        produced = []
        for _ in range(new_tokens):
            token = int(logits[0, -1].argmax())
            produced.append(token)
            logits = self.model(torch.tensor([[token]]), session)
        return produced

    @torch.inference_mode()
    def score(self, texts: list[list[int]]) -> list[float]:
        longest = max(len(t) for t in texts)
        ids = torch.tensor([[0] * (longest - len(t)) + t for t in texts])
        logits = self.model(ids, Session()).log_softmax(-1)
        taken = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        return [float(row[longest - len(t) :].sum()) for row, t in zip(taken, texts, strict=True)]
