"""Pretraining on packed documents."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


def pack(documents: list[list[int]], length: int, eos: int = 1) -> dict[str, torch.Tensor]:
    """Documents one behind another in rows of one length, with positions that begin again in each document."""
    ids, positions, documents_of = [], [], []
    for number, document in enumerate(documents):
        text = [*document, eos]
        ids += text
        positions += range(len(text))
        documents_of += [number] * len(text)
    rows = len(ids) // length
    cut = lambda x: torch.tensor(x[: rows * length]).view(rows, length)  # noqa: E731
    return {"input_ids": cut(ids), "position_ids": cut(positions), "document_ids": cut(documents_of)}


class PackedAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, document_ids):
        b, n, d = x.shape
        q, k, v = self.wqkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, n, d))


class MaskedPackedAttention(PackedAttention):
    def forward(self, x, document_ids):
        b, n, d = x.shape
        q, k, v = self.wqkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        same = document_ids[:, :, None] == document_ids[:, None, :]
        causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        y = scaled_dot_product_attention(q, k, v, attn_mask=(same | causal)[:, None])
        return self.wo(y.transpose(1, 2).reshape(b, n, d))


class PackedModel(nn.Module):
    def __init__(self, vocab=128, dim=64, heads=4, depth=2, max_len=256, attention=PackedAttention):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.attention = nn.ModuleList([attention(dim, heads) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids, position_ids, document_ids):
        x = self.tok(input_ids) + self.pos(position_ids)
        for attention, norm in zip(self.attention, self.norms, strict=True):
            x = x + attention(norm(x), document_ids)
        return self.head(x)


def train_step(model, batch, optimizer):
    logits = model(**batch)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class FlashLikeTrainer:
    """Finetuning of a transformers model on packed rows."""

    def __init__(self, model, tokenizer=None, length=64):
        self.model, self.tokenizer, self.length = model, tokenizer, length

    def collate(self, documents):
        batch = pack(documents, self.length)
        ids = batch["input_ids"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": batch["position_ids"]}

    def step(self, documents):
        batch = self.collate(documents)
        return self.model(**batch, labels=batch["input_ids"]).loss
