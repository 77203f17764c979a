"""Correct code of other kinds that looks like a mistake, and is none; and this repository, which is clean."""

import textwrap
from pathlib import Path

import pytest

from regard.doctor import RuleSelection, Severity, diagnose
from regard_doctor.diagnosis import diagnose_files
from regard_doctor.doctor_settings import settings_near
from regard_doctor.source_discovery import python_files

ROOT = Path(__file__).parents[2]
MISTAKES = RuleSelection(least=Severity.WARNING)
CORRECT = {
    "a mask that is called as queries and keys, or as both": """
        class Two(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, a, b, a_mask, b_mask):
                x = F.scaled_dot_product_attention(self.q(a), self.k(a), self.v(a), attn_mask=a_mask[:, None, :])
                pairs = a_mask[:, :, None] & b_mask[:, None, :]
                return F.scaled_dot_product_attention(self.q(x), self.k(b), self.v(b), attn_mask=pairs)
    """,
    "causal with a mask, and by an option without it": """
        def attend(q, k, v, mask=None, causal=True):
            if mask is not None:
                if causal:
                    mask = mask & torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    """,
    "a bias of a mask that a caller may have inverted": """
        def attend(q, k, v, attention_mask):
            scores = q @ k.mT / math.sqrt(q.size(-1)) + attention_mask * torch.finfo(q.dtype).min
            return scores.softmax(-1) @ v
    """,
    "a bias of a mask of a tokenizer": """
        def attend(q, k, v, attention_mask):
            bias = (1.0 - attention_mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
            return (q @ k.mT / math.sqrt(q.size(-1)) + bias).softmax(-1) @ v
    """,
    "the future or padding, which are hidden": """
        def attend(q, k, v, tokens, pad_id):
            future = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
            hidden = future | (tokens == pad_id)[:, None, None, :]
            scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(hidden, torch.finfo(q.dtype).min)
            return scores.softmax(-1) @ v
    """,
    "a prefix of words that all may see": """
        def attend(q, k, v, lengths):
            i = torch.arange(q.size(-2))
            shown = (i[:, None] >= i) | (i < lengths[:, None])[:, None, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=shown)
    """,
    "keys of rows that are copied for beams": """
        def attend(q, k, v, beams):
            b, h, n, d = k.shape
            k = k.unsqueeze(1).expand(b, beams, h, n, d).reshape(b * beams, h, n, d)
            v = v.unsqueeze(1).expand(b, beams, h, n, d).flatten(0, 1)
            return (q @ k.mT / math.sqrt(d)).softmax(-1) @ v
    """,
    "positions of tokens that stand along axis 0, which the model moves": """
        class Block(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)

            def forward(self, x):
                q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return x + y.transpose(1, 2).flatten(2)

        class Model(nn.Module):
            def __init__(self, vocabulary, dim):
                super().__init__()
                self.token, self.place = nn.Embedding(vocabulary, dim), nn.Embedding(512, dim)
                self.block = Block(dim, 4)

            def forward(self, tokens):
                places = torch.arange(tokens.size(0), device=tokens.device).unsqueeze(1)
                x = self.token(tokens) + self.place(places)
                return self.block(x.transpose(0, 1))
    """,
    "frames of a film along axis 0, whose parts attend to each other": """
        class Block(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)

            def forward(self, x):
                q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return x + y.transpose(1, 2).flatten(2)

        class Film(nn.Module):
            def __init__(self, width, dim):
                super().__init__()
                self.part, self.time, self.block = nn.Linear(width, dim), nn.Embedding(64, dim), Block(dim, 4)

            def forward(self, parts):
                times = torch.arange(parts.size(0), device=parts.device).unsqueeze(1)
                return self.block(self.part(parts) + self.time(times))
    """,
    "one query beside a causal path": """
        def attend(q, k, v):
            if q.size(-2) == 1:
                return F.scaled_dot_product_attention(q, k, v)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """,
    "one query left over by a guard": """
        def attend(q, k, v):
            if q.size(-2) > 1:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return F.scaled_dot_product_attention(q, k, v)
    """,
    "one query in the other branch, with a cache": """
        def attend(q, k, v, cache=None):
            if cache is None or q.size(-2) != 1:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                out = F.scaled_dot_product_attention(q, k, v)
            return out
    """,
    "a finite mask whose comment, or that of its sibling, gives the reason": """
        def attend(q, k, v, mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            # -inf would make rows without any key NaN
            scores = scores.masked_fill(mask == 0, -1e9)
            return torch.softmax(scores, dim=-1) @ v

        def attend_again(q, k, v, mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(mask == 0, -1e9)
            return torch.softmax(scores, dim=-1) @ v
    """,
    "a mask that a method would store, which nothing calls": """
        class Attention(nn.Module):
            def stored(self, n):
                if self.mask is not None:
                    return self.mask[:n, :n]
                mask = torch.ones((n, n), dtype=torch.bool).triu(1)
                self.register_buffer("mask", mask, persistent=False)
                return mask

            def forward(self, q, k, v):
                mask = torch.ones((q.size(-2), k.size(-2)), dtype=torch.bool, device=q.device).triu(1)
                scores = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(mask, -math.inf)
                weights = scores.softmax(dim=-1)
                return weights @ v, weights
    """,
    "heads mixed behind the softmax": """
        def attend(q, k, v, scale, mix):
            weights = (torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.size(-1) ** -0.5).softmax(dim=-1)
            weights = torch.einsum("b h i j, h g -> b g i j", weights, mix)
            return torch.einsum("b h i j, b h j d -> b h i d", weights, v)
    """,
    "classes of queries spread over pixels": """
        def segmentation(outputs):
            classes = outputs.logits.softmax(dim=-1)
            pixels = outputs.masks.sigmoid()
            return torch.einsum("bqc, bqhw -> bchw", classes, pixels)
    """,
    "queries and keys that read each other": """
        def exchange(q, k, slots, tokens):
            scores = torch.einsum("bhtd,bhsd->bhts", q, k) * q.size(-1) ** -0.5
            to_tokens, to_slots = scores.softmax(dim=-1), scores.softmax(dim=-2)
            return torch.einsum("bhts,bhsd->bhtd", to_tokens, slots), torch.einsum("bhts,bhtd->bhsd", to_slots, tokens)
    """,
    "a window that is joined with a causal mask": """
        from torch.nn.attention.flex_attention import and_masks

        def window(size):
            def inner(b, h, q_idx, kv_idx):
                return kv_idx > q_idx - size
            return inner

        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        def windowed(size):
            return and_masks(window(size), causal)
    """,
    "texts, and no padded ids, for an engine": """
        from vllm import LLM

        tokenizer = AutoTokenizer.from_pretrained("model", padding_side="left")

        class Server:
            def complete(self, prompts):
                return self.llm.generate(prompts, self.sampling)
    """,
    "a covariance": """
        def updated(raw, z):
            std = raw.exp()
            return std @ z @ std.T
    """,
    "weights that are hidden again": """
        def attend(q, k, v, mask):
            scores = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).masked_fill(mask, -10000.0)
            return torch.softmax(scores, dim=-1).masked_fill(mask, 0.0) @ v
    """,
    "Luong's score has no scale": """
        class Luong(nn.Module):
            def __init__(self, hidden):
                super().__init__()
                self.attn = nn.Linear(hidden, hidden)

            def forward(self, hidden, outputs):
                scores = torch.bmm(hidden.unsqueeze(1), self.attn(outputs).transpose(1, 2))
                weights = F.softmax(scores.squeeze(1), dim=1).unsqueeze(1)
                return torch.bmm(weights, outputs)
    """,
    "weights transposed": """
        class NonLocal(nn.Module):
            def __init__(self, c):
                super().__init__()
                self.q, self.k, self.v = (nn.Conv2d(c, c, 1) for _ in range(3))

            def forward(self, x):
                b, c, h, w = x.size()
                q = self.q(x).view(b, -1, h * w).permute(0, 2, 1)
                k, v = self.k(x).view(b, -1, h * w), self.v(x).view(b, -1, h * w)
                weights = torch.softmax(torch.bmm(q, k), dim=-1)
                return torch.bmm(v, weights.permute(0, 2, 1)).view(b, c, h, w)
    """,
    "softmax of a vector of scores": """
        def read(state, memory):
            return (state @ memory.T).softmax(0) @ memory
    """,
    "a position bias instead of a scale": """
        class T5(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x, position_bias):
                scores = self.q(x) @ self.k(x).transpose(-1, -2)
                return (scores + position_bias).softmax(-1) @ self.v(x)
    """,
    "scale given to a function": """
        def eager(module, query, key, value, attention_mask, scaling):
            weights = torch.matmul(query, key.transpose(2, 3)) * scaling
            if attention_mask is not None:
                weights = weights + attention_mask
            weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
            return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
    """,
    "normalized queries and keys": """
        def cosine(q, k, v, temperature):
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            return (q @ k.mT * temperature.exp()).softmax(-1) @ v
    """,
    "half of the scale on each side": """
        def attend(q, k, v, head_dim):
            q, k = q * head_dim**-0.25, k * head_dim**-0.25
            return F.scaled_dot_product_attention(q, k, v, scale=1.0), (q @ k.mT).softmax(-1) @ v
    """,
    "causal without a cache, a mask with one": """
        def attend(q, k, v, cache=None):
            if cache is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            return F.scaled_dot_product_attention(q, k, v, is_causal=False)
    """,
    "one key head for all": """
        def multi_query(q, k, v, n_rep):
            k, v = k.unsqueeze(1).repeat(1, n_rep, 1, 1), v.unsqueeze(1).repeat(1, n_rep, 1, 1)
            return F.scaled_dot_product_attention(q, k, v)
    """,
    "a recurrent decoder": """
        def decode(cell, state, memory, steps, scale):
            for step in range(steps):
                context = torch.softmax(state @ memory.mT * scale, -1) @ memory
                state = cell(context, state)
            return state
    """,
    "length first": """
        class Block(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.attn = nn.MultiheadAttention(d, 8)

            def forward(self, x):
                batch, length, dim = x.shape
                x = x.transpose(0, 1)
                return self.attn(x, x, x, need_weights=False)[0].transpose(0, 1)
    """,
    "generation with a cache": """
        def generate(model, tokens, steps):
            past_key_values, new = None, tokens
            for _ in range(steps):
                logits, past_key_values = model(new, past_key_values)
                new = logits[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, new], dim=1)
            return tokens
    """,
    "rows without keys made finite": """
        def attend(q, k, v, keep):
            scores = (q @ k.mT / 8).masked_fill(~keep, -math.inf)
            empty = (scores == -math.inf).all(-1, keepdim=True)
            return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v
    """,
    "a mask inverted by a helper": """
        def attend(q, k, v, attention_mask):
            scores = q @ k.mT / math.sqrt(q.size(-1))
            scores = scores.masked_fill(attention_mask, float("-inf"))
            return scores.softmax(-1) @ v
    """,
    "a decoder of queries": """
        class DecoderLayer(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.self_attn = nn.MultiheadAttention(d, 8)
                self.cross_attn = nn.MultiheadAttention(d, 8)

            def forward(self, object_queries, memory):
                q = object_queries
                q = q + self.self_attn(q, q, q, need_weights=False)[0]
                return q + self.cross_attn(q, memory, memory, need_weights=False)[0]
    """,
    "layers in a loop, each with its entry of a cache": """
        class Attention(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x, read, past=None):
                q, k, v = self.q(x), self.k(read), self.v(read)
                if past is not None:
                    k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
                return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)), dim=-1) @ v

        class Layer(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.inner, self.cross = Attention(d), Attention(d)

            def forward(self, x, memory, past):
                x = self.inner(x, x, past)
                return self.cross(x, memory)

        class Encoder(nn.Module):
            def __init__(self, d, n):
                super().__init__()
                self.layers = nn.ModuleList([Layer(d) for _ in range(n)])

            def forward(self, x, memory, pasts):
                for i, layer in enumerate(self.layers):
                    x = layer(x, memory, pasts[i])
                return x
    """,
    "scales of a pyramid in a loop": """
        class Pyramid(nn.Module):
            def __init__(self, d, n):
                super().__init__()
                self.n = n
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def attend(self, x, y):
                q, k, v = self.q(x), self.k(y), self.v(y)
                return torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), dim=-1) @ v

            def forward(self, maps, text):
                return [self.attend(maps[i], text) for i in range(self.n)]
    """,
    "a reference that is slow on purpose": """
        def reference_attention(q, k, v):
            rows = []
            for i in range(q.size(1)):
                weights = torch.softmax(torch.einsum("hd,hkd->hk", q[:, i], k[:, : i + 1]) / math.sqrt(q.size(-1)), -1)
                rows.append(torch.einsum("hk,hkd->hd", weights, v[:, : i + 1]))
            return torch.stack(rows, 1)
    """,
    "whole numbers in half precision that are weights": """
        def test_rows_are_read(store):
            weight = torch.arange(4096, dtype=torch.bfloat16).reshape(64, 64)
            store.save(weight)
            return torch.softmax(store.read("weight"), dim=-1)

        def bins(alibi):
            return torch.arange(64, dtype=torch.bfloat16)
    """,
    "a probability that the caller passes, as to SDPA": """
        def attend(q, k, v, dropout_p=0.0):
            weights = torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), dim=-1)
            if dropout_p > 0.0:
                weights = F.dropout(weights, p=dropout_p)
            return weights @ v

        class Attention(nn.Module):
            def __init__(self, p):
                super().__init__()
                self.p = p

            def forward(self, q, k, v):
                if not self.training:
                    p = 0.0
                else:
                    p = self.p
                weights = torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), dim=-1)
                if self.training:
                    weights = F.dropout(weights, 0.2)
                return F.dropout(weights, p) @ v
    """,
    "descriptors shared out to clusters": """
        class Clusters(nn.Module):
            def __init__(self, d, n):
                super().__init__()
                self.assign = nn.Linear(d, n)
                self.bias = nn.Parameter(torch.zeros(4))

            def forward(self, x):
                shares = F.softmax(self.assign(x), dim=2)
                by_matrix = torch.einsum("btn,btd->bnd", shares, x)
                by_sums = (shares.unsqueeze(-1) * x.unsqueeze(2)).sum(dim=3).sum(dim=1)
                return by_matrix.sum(-1) + by_sums

        class Downsample(nn.Module):
            def __init__(self):
                super().__init__()
                self.bias = nn.Parameter(torch.zeros(4))

            def forward(self, x):
                weights = self.bias.softmax(dim=0)
                return (x.unflatten(0, (-1, 4)) * weights.unsqueeze(-1).unsqueeze(-1)).sum(dim=1)
    """,
    "attention that is named as not causal": """
        class NonCausalSelfAttention(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.qkv = nn.Linear(d, 3 * d)

            def forward(self, x):
                q, k, v = self.qkv(x).chunk(3, dim=-1)
                return F.scaled_dot_product_attention(q, k, v)
    """,
    "features joined in a loop, and no tokens": """
        class UNet(nn.Module):
            def forward(self, h, skips, sources):
                for i, block in enumerate(self.blocks):
                    h = torch.cat([h, skips.pop()], dim=1)
                    h = block(h)
                    h = self.conditions[i](h, context=sources[h.shape[-1]])
                return h

        def widened(maps):
            for maps in maps.values():
                if maps.shape[-1] == 1024:
                    continue
                maps = torch.cat([maps, maps], dim=1)
                maps = F.adaptive_avg_pool3d(maps, 2)
            return maps.softmax(-1)
    """,
    "generation with a memory of states": """
        def generate(model, tokens, steps):
            logits, *mems = model(tokens, return_memory=True)
            for _ in range(steps):
                new = logits[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, new], dim=1)
                last = tokens[:, -1:]
                logits, *mems = model(last, *mems, return_memory=True)
            return tokens.float().softmax(-1)
    """,
    "a cache of masks": """
        class Attention(nn.Module):
            def attend(self, q, k, v, keep, store):
                mask_cache = store.get("masks") if store else None
                if mask_cache is None:
                    mask_cache = {}
                    attn_mask_store["masks"] = mask_cache
                mask_cache[len(keep)] = keep
                return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    """,
    "one text, which has no padding": """
        tokenizer = AutoTokenizer.from_pretrained("model", padding_side="left")

        def answer(model, text):
            ids = tokenizer(text, return_tensors="pt").input_ids
            return model.generate(ids, max_new_tokens=8)
    """,
    "a text of the file about padding": """
        MESSAGE = "set padding_side='left' when you make the tokenizer"

        def answer(model, ids):
            return model.generate(ids, max_new_tokens=8)
    """,
    "scores with the heads last": """
        def attend(q, k, v, q_mask, kv_mask):
            scores = torch.einsum("nlhd,nshd->nlsh", q, k)
            if kv_mask is not None:
                keep = q_mask[:, :, None, None] * kv_mask[:, None, :, None]
                scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
            weights = torch.softmax(scores / q.size(3) ** 0.5, dim=2)
            return torch.einsum("nlsh,nshd->nlhd", weights, v)
    """,
    "heads switched off": """
        def attend(q, k, v, layer_head_mask=None):
            weights = torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), dim=-1)
            if layer_head_mask is not None:
                weights = layer_head_mask.view(1, -1, 1, 1) * weights
            return weights @ v
    """,
    "compiled where there is a GPU": """
        from torch.nn.attention.flex_attention import flex_attention

        _compiled = None

        def attend(q, k, v, blocks):
            global _compiled
            if q.is_cuda:
                if _compiled is None:
                    _compiled = torch.compile(flex_attention)
                return _compiled(q, k, v, block_mask=blocks)
            return flex_attention(q, k, v, block_mask=blocks)
    """,
    "rotated halves from a table in a cache": """
        def rotated(x, cos_sin_cache, half):
            cos, sin = cos_sin_cache[:, :half], cos_sin_cache[:, half:]
            out = torch.empty_like(x)
            out[..., :half] = x[..., :half] * cos - x[..., half:] * sin
            out[..., half:] = x[..., half:] * cos + x[..., :half] * sin
            return out

        def turned(x, cos_cache, sin_cache):
            one, other = x.chunk(2, dim=-1)
            return torch.cat((one * cos_cache - other * sin_cache, other * cos_cache + one * sin_cache), dim=-1)

        def attend(q, k, v, cos_sin_cache, half):
            q, k = rotated(q, cos_sin_cache, half), rotated(k, cos_sin_cache, half)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def attend_again(q, k, v, cos_cache, sin_cache):
            q, k = turned(q, cos_cache, sin_cache), turned(k, cos_cache, sin_cache)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """,
    "lengths of documents passed on": """
        class Layer(nn.Module):
            def attend(self, x, lengths_of_documents=None):
                if lengths_of_documents is None:
                    return F.scaled_dot_product_attention(x, x, x, is_causal=True)
                return flash_attn_varlen_func(x, x, x, lengths_of_documents, causal=True)

            def forward(self, x, cu_seqlens=None):
                return self.attend(x, lengths_of_documents=cu_seqlens)
    """,
    "a buffer without a mask as yet": """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mask", None, persistent=False)

            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """,
    "a scale that published weights were trained with": """
        from transformers import PreTrainedModel

        class Attention(nn.Module):
            def __init__(self, d, heads):
                super().__init__()
                self.heads = heads
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x):
                q, k, v = (one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
                return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v

        class Encoder(PreTrainedModel):
            def forward(self, x):
                return self.attention(x)
    """,
    "weighted least squares": """
        def solved(points, residuals, left):
            weights = torch.exp(-residuals)
            rows, others = torch.stack([points * weights, weights], -1), torch.stack([points, weights], -1)
            return rows.inverse() @ (others @ left)

        def shares(residuals):
            return F.softmax(residuals, dim=-1)
    """,
    "words that are left out of a vocabulary": """
        class Head(nn.Module):
            def __init__(self, words, special):
                super().__init__()
                allowed = torch.zeros(words)
                allowed[special] = 1
                self.register_buffer("word_prob_mask", (1.0 - allowed) * -10000.0)

            def forward(self, logits):
                return F.softmax(logits + self.word_prob_mask, dim=-1)
    """,
    "dropout that a switch of the input turns off, and dropout of another model": """
        class Attention(nn.Module):
            def forward(self, inputs):
                x, switch = inputs
                if self.p > 0.0 and switch:
                    x = F.dropout(x, self.p)
                return F.scaled_dot_product_attention(x, x, x)

        class Convolution(nn.Module):
            def __init__(self, p):
                super().__init__()
                self.p = p

            def forward(self, x):
                return F.dropout(x, self.p)
    """,
    "a model that is built for inference": """
        class Parser:
            def build(self, config, training):
                if not training:
                    self.config.lstm_dropout = 0.0
                return F.softmax(Model(self.config).scores, dim=-1)
    """,
    "padded queries set to 0": """
        def attend(q, k, v, mask):
            weights = torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), dim=-1) * mask.unsqueeze(-1)
            return weights @ v
    """,
    "a mask of frames for convolutions": """
        class Encoder(nn.Module):
            def _create_mask(self, x, lengths):
                keep = torch.arange(x.size(2)).expand(x.size(0), x.size(2)) < lengths.unsqueeze(1)
                return keep.to(x.dtype).unsqueeze(1).unsqueeze(-1)

            def forward(self, x, lengths):
                x = self.convolution(x * self._create_mask(x, lengths))
                return F.scaled_dot_product_attention(x, x, x)
    """,
    "an attention function of an engine, which has masks of its own": """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        def engine_attention(module, query, key, value, attention_mask, **kwargs):
            return module.engine.forward(query, key, value), None

        ALL_ATTENTION_FUNCTIONS.register("engine", engine_attention)
    """,
    "a decoder that others read, and names of weights in a set": """
        class AutoEncoder(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.decoder = Decoder(d)

            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v)

        def loaded(names):
            loaded_weight = set()
            for name in names:
                loaded_weight.add(name)
            return loaded_weight
    """,
    "values rotated for quantization": """
        class Attention(nn.Module):
            def forward(self, q, k, v):
                q, k, v = rotate(q, self.hadamard), rotate(k, self.hadamard), rotate(v, self.hadamard)
                return F.scaled_dot_product_attention(q, k, v)
    """,
    "a layer without attention that skips a step with a cache": """
        class Convolution(nn.Module):
            def forward(self, x, mask, cache=None):
                if cache is None:
                    att_in = x.masked_fill(mask, 0.0)
                return self.convolution(att_in)

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v)
    """,
    "values among what a function normalizes and rotates": """
        class Attention(nn.Module):
            def apply_norm_and_rotary(self, q, k, v, rope):
                q, k = turned(self.q_norm(q), rope.cos), turned(self.k_norm(k), rope.cos)
                return q, k, v

            def forward(self, q, k, v, rope):
                q, k, v = self.apply_norm_and_rotary(q, k, v, rope)
                return F.scaled_dot_product_attention(q, k, v)
    """,
    "times converted back before their sine": """
        def embedded(times, x, freq_shift):
            times = times.to(x.dtype)
            scales = torch.arange(64, device=times.device) / (64 - freq_shift)
            angles = times[:, None].float() * scales[None]
            return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v)
    """,
    "a method that replaces one of another file, and a fixed property": """
        def attention_forward(self, x, attention_mask=None, encoder_attention_mask=None):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask)

        class Decoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.causal = False

            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v)

        class Layer(AttentionOfAnotherFile):
            def forward(self, q, k, v, mask=None):
                return F.scaled_dot_product_attention(q, k, v)
    """,
    "an attention function of another file": """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from .kernels import fused

        ALL_ATTENTION_FUNCTIONS.register("fused", fused)
    """,
    "one sequence as source and target": """
        class Scorer(nn.Module):
            def __init__(self, words, d):
                super().__init__()
                self.embedding, self.positions = nn.Embedding(words, d), nn.Embedding(512, d)
                self.transformer = nn.Transformer(d, 8)

            def forward(self, tokens):
                x = self.embedding(tokens) + self.positions(torch.arange(tokens.size(0)))[:, None]
                x = self.transformer(x, x)
                return x[-1]
    """,
    "keys that are copied for a reason": """
        def attend(q, k, v, groups):
            # enable_gqa=True would choose the slow kernel in this version
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            return F.scaled_dot_product_attention(q, k, v)
    """,
    "left padding that nothing asks for": """
        tokenizer = AutoTokenizer.from_pretrained("model", padding_side="left")

        def answer(model, ids):
            return model.generate(ids, max_new_tokens=8)
    """,
    "a decoder of pictures": """
        class DecoderLayer(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.inner, self.cross = nn.MultiheadAttention(d, 8), nn.MultiheadAttention(d, 8)

            def forward(self, patches, memory):
                x = patches + self.inner(patches, patches, patches, need_weights=False)[0]
                return x + self.cross(x, memory, memory, need_weights=False)[0]
    """,
    "keys joined with a cache in another branch than they are rotated in": """
        class Attention(nn.Module):
            def forward(self, q, x, past_key_value, positions):
                if past_key_value is not None:
                    key = torch.cat([past_key_value[0], self.k(x)], dim=2)
                    value = torch.cat([past_key_value[1], self.v(x)], dim=2)
                else:
                    key, value = self.k(x), self.v(x)
                    q, key = apply_rotary(q, key, positions)
                return F.scaled_dot_product_attention(q, key, value, attn_mask=self.mask)
    """,
    "texts for an engine, and ids that are not padded": """
        tokenizer = AutoTokenizer.from_pretrained("model", padding_side="left")

        def batches(texts):
            return tokenizer(texts, padding=True, return_tensors="pt")

        def answers(model, prompts, sampling):
            if "vllm_async" in MODELS:
                return model.generate(prompts, sampling)
            ids = tokenizer([prompts], return_tensors="pt", padding=True)["input_ids"]
            return model.generate(ids, max_new_tokens=8)
    """,
    "an option of convolutions, and a mask for a base in another file": """
        class FeedForward(nn.Module):
            def __init__(self, causal=False):
                super().__init__()
                self.causal = causal
                self.pad = self._causal_pad if causal else self._same_pad

        class Model(ModelOfAnotherFile):
            def __init__(self, longest):
                super().__init__()
                self.register_buffer("causal_mask", torch.full((longest, longest), True).triu(1))

            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(q))
    """,
    "an option that the constructor reads, and a mask that is said to be unused": """
        class Block(nn.Module):
            def __init__(self, d, is_causal=False):
                super().__init__()
                self.is_causal = is_causal
                self.convolution = Convolution(d, left=is_causal)

            def forward(self, q, k, v, key_padding_mask=None):
                '''Attend.

                key_padding_mask: not used, for the same signature as the other blocks.
                '''
                return self.convolution(F.scaled_dot_product_attention(q, k, v))
    """,
    "a decoder of boxes, and one that reads pictures for labels": """
        class DecoderLayer(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.inner, self.cross = nn.MultiheadAttention(d, 8), nn.MultiheadAttention(d, 8)

            def forward(self, tgt, memory, reference_points):
                tgt = tgt + self.inner(tgt, tgt, tgt, need_weights=False)[0]
                return tgt + self.cross(tgt + reference_points, memory, memory, need_weights=False)[0]

        class Context(nn.Module):
            def __init__(self, kinds, d):
                super().__init__()
                self.kinds, self.geometry = nn.Embedding(kinds, d), nn.Linear(4, d)
                self.read = nn.TransformerDecoder(nn.TransformerDecoderLayer(d, 8, batch_first=True), 2)

            def forward(self, boxes, labels, picture, mask):
                x = self.geometry(boxes) + self.kinds(labels)
                return self.read(x, picture, tgt_key_padding_mask=~mask)
    """,
    "scores hidden in float32": """
        def attend(q, k, v, hidden):
            scores = (q / math.sqrt(q.size(-1))) @ k.transpose(2, 3)
            scores = scores.float()
            scores = scores.masked_fill(hidden, -1e18)
            return F.softmax(scores, dim=-1).to(q.dtype) @ v

        def converted(q, k, v, hidden):
            scores = torch.einsum("bhid,bhjd->bhij", q.to(torch.float32), k.to(torch.float32)) * q.size(-1) ** -0.5
            return torch.einsum("bhij,bhjd->bhid", scores.masked_fill(hidden, -1e9).softmax(-1), v.float())
    """,
    "a module of torch that another one is compared with, in a test": """
        class Streaming(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.qkv = nn.Linear(d, 3 * d)

            def forward(self, x):
                q, k, v = self.qkv(x).chunk(3, dim=-1)
                return F.scaled_dot_product_attention(q, k, v)

        def test_streaming_equals_torch():
            ours, theirs = Streaming(64), nn.MultiheadAttention(64, 1, batch_first=True)
            x = torch.randn(3, 7, 64)
            assert torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-5)
    """,
    "scores hidden in float32 and converted back, where there is a mask": """
        def attend(q, k, v, bias, hidden=None):
            scores = torch.einsum("ibnd,jbnd->ijbn", q, k) * q.size(-1) ** -0.5 + bias
            if hidden is not None:
                scores = scores.float().masked_fill(hidden[:, :, :, None], -1e30).type_as(scores)
            return torch.einsum("ijbn,jbnd->ibnd", F.softmax(scores, dim=1), v)
    """,
    "causal without a mask of the caller, who passes one with a cache": """
        class Attention(nn.Module):
            def __init__(self, d, heads):
                super().__init__()
                self.heads, self.qkv, self.kv_cache = heads, nn.Linear(d, 3 * d), None

            def forward(self, x, mask, input_pos=None):
                b, n, d = x.shape
                q, k, v = (one.view(b, n, self.heads, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
                if self.kv_cache is not None:
                    k, v = self.kv_cache.update(input_pos, k, v)
                if mask is None:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    """,
    "the window of one step, of a cache that is kept": """
        def step(q, k, v, cache_k, cache_v, window):
            k, v = torch.cat((cache_k, k), dim=-2), torch.cat((cache_v, v), dim=-2)
            recent_k, recent_v = k[..., -window:, :], v[..., -window:, :]
            return F.scaled_dot_product_attention(q, recent_k, recent_v), (k, v)
    """,
    "a mask in float32, which makes the scores float32": """
        class Columns(nn.Module):
            def __init__(self, columns, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
                self.register_buffer("order", torch.arange(columns))

            def hidden(self, columns):
                seen = self.order[None, :].repeat(columns, 1) <= self.order[:, None]
                return (1.0 - seen.float()) * -1e5

            def forward(self, x):
                q, k, v = self.q(x), self.k(x), self.v(x)
                scores = torch.einsum("ijk,ilk->ijl", q, k) * q.size(-1) ** -0.5 + self.hidden(x.size(1))
                return torch.einsum("ijl,ilk->ijk", scores.softmax(-1), v)
    """,
    "a bilinear form": """
        class Parser(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.head = nn.Sequential(nn.Linear(d, d), nn.ELU())
                self.child = nn.Sequential(nn.Linear(d, d), nn.ELU())
                self.arcs = Arcs(d)

            def forward(self, x):
                return self.arcs(self.head(x), self.child(x))

        class Arcs(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.U = nn.Parameter(torch.empty(d, d))

            def forward(self, head, child):
                scores = child.matmul(self.U)
                return scores.bmm(head.transpose(-1, -2))
    """,
    "a mistake that the paper has, and a comment that says so": """
        # Rotary positions as published: the reference pairs neighbours with a table of halves, a
        # deliberate mismatch that its weights were trained with.
        def rope_table(positions, inv_freq):
            angles = torch.outer(positions, inv_freq)
            angles = torch.cat((angles, angles), dim=-1)
            return angles.cos(), angles.sin()

        def apply_rope(x, cos, sin):
            even, odd = x[..., ::2], x[..., 1::2]
            return x * cos + torch.stack((-odd, even), dim=-1).flatten(-2) * sin
    """,
    "scores that a function changes, which gets the tokens too": """
        def greedy(model, tokens, steps, penalty):
            for step in range(steps):
                scores = model.step(step)
                scores = scores[:, -1]
                scores = penalized(tokens, scores, penalty)
                tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], dim=1)
            return tokens

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v)
    """,
    "a function that is handed out, with the parameters of its kind": """
        class SlowKernel:
            def load(self):
                def attention(q, k, v, attention_mask=None, is_causal=False, cu_seqlens=None):
                    return F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)

                return attention
    """,
    "queries that were scaled before, for either of two functions": """
        def plain(query, key, value, mask=None):
            weights = torch.einsum("bqhd,bkhd->bhqk", query, key)
            if mask is not None:
                weights = weights.masked_fill(~mask, float("-inf"))
            return torch.einsum("bhqk,bkhd->bqhd", F.softmax(weights, dim=-1), value)

        def fused(query, key, value, mask=None):
            q, k, v = (one.transpose(1, 2) for one in (query, key, value))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2)

        class Attention(nn.Module):
            def __init__(self, d, fast=True):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
                self.attend = fused if fast else plain
                self.gain = nn.Parameter(torch.zeros(d))

            def forward(self, x):
                q = self.q(x).unflatten(-1, (8, -1)) * F.softplus(self.gain) / 8
                return self.attend(q, self.k(x).unflatten(-1, (8, -1)), self.v(x).unflatten(-1, (8, -1)))
    """,
    "a decoder of channels, which have no order": """
        class Electrodes(nn.Module):
            def __init__(self, channels, d):
                super().__init__()
                self.kinds, self.places = nn.Embedding(channels, d), nn.Linear(3, d)
                self.read = nn.TransformerDecoder(nn.TransformerDecoderLayer(d, 8, batch_first=True), 1)
                self.out = nn.Linear(d, 40)

            def forward(self, encoded, channel_names, locations):
                queries = self.places(locations) + self.kinds(channel_names)
                return self.out(self.read(queries, encoded))
    """,
    "values that are rotated, and an output that is rotated back": """
        class Attention(nn.Module):
            def __init__(self, d, rope, reverse_rope):
                super().__init__()
                self.qkv, self.value_rope, self.value_reverse_rope = nn.Linear(d, 3 * d), rope, reverse_rope

            def forward(self, x):
                query, key, value = self.qkv(x).unflatten(-1, (3, 8, -1)).unbind(2)
                scores = torch.einsum("bihd,bjhd->bhij", query, key) * query.size(-1) ** -0.5
                value = self.value_rope(value)
                out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)
                return self.value_reverse_rope(out)
    """,
    "a sequence that is cut into chunks in the loop": """
        from einops import rearrange

        def generate(model, out, chunk, steps):
            memory = None
            for _ in range(steps):
                scores, memory = model.step(memory)
                out = torch.cat((out, scores.argmax(-1, keepdim=True)), dim=1)
                if out.size(1) % chunk == 0:
                    last = rearrange(out, "b (c n) -> b c n", n=chunk)[:, -1]
                    out = torch.cat((out, model.looked_up(last)), dim=1)
            return out

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v)
    """,
    "a mask, dropout and a buffer for versions of torch, and one query with a cache": """
        class Attention(nn.Module):
            def __init__(self, d, heads, block, dropout):
                super().__init__()
                self.heads, self.qkv, self.dropout = heads, nn.Linear(d, 3 * d), dropout
                self.flash = hasattr(F, "scaled_dot_product_attention") and self.dropout == 0.0
                if not self.flash:
                    self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

            def forward(self, x, past=None):
                b, n, d = x.shape
                q, k, v = (one.view(b, n, self.heads, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
                if past is not None:
                    k, v = torch.cat((past[0], k), dim=-2), torch.cat((past[1], v), dim=-2)
                if self.flash:
                    # with a cache, q has the last token alone, which sees all keys
                    y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=past is None)
                else:
                    scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
                    scores = scores.masked_fill(self.bias[:, :, k.size(2) - n : k.size(2), : k.size(2)] == 0, -math.inf)
                    y = F.dropout(scores.softmax(-1), self.dropout, self.training) @ v
                return y.transpose(1, 2).reshape(b, n, d), (k, v)
    """,
    "the decoder of a tokenizer of pictures": """
        class Attention(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x, y):
                q, k, v = self.q(x), self.k(y), self.v(y)
                return F.scaled_dot_product_attention(q, k, v)

        class DecoderBlock(nn.Module):
            # reads patches, and a token for the class, in the context of others
            def __init__(self, d):
                super().__init__()
                self.self_attn, self.cross_attn = Attention(d), Attention(d)

            def forward(self, patches, context):
                x = patches + self.self_attn(patches, patches)
                return x + self.cross_attn(x, context)
    """,
    "attention functions by their names, with the parameters of their kind": """
        def plain(q, k, v, mask=None, window_size=None):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            return torch.softmax(scores.masked_fill(mask, -math.inf), dim=-1) @ v

        def fused(q, k, v, mask=None, window_size=None):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else ~mask)

        KERNELS = {"plain": plain, "fused": fused}

        @ATTENTION.register_module()
        class Deformable(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x, key_padding_mask=None):
                return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
    """,
    "the width of all heads, with published weights": """
        from torch.hub import load_state_dict_from_url

        class MultiHead(nn.Module):
            def __init__(self, embed_size, heads):
                super().__init__()
                self.embed_size, self.heads, self.head_dim = embed_size, heads, embed_size // heads
                self.q, self.k, self.v = (nn.Linear(embed_size, embed_size) for _ in range(3))

            def forward(self, x):
                n, length, _ = x.shape
                q = self.q(x).view(n, length, self.heads, self.head_dim).transpose(1, 2)
                k = self.k(x).view(n, length, self.heads, self.head_dim).transpose(1, 2)
                v = self.v(x).view(n, length, self.heads, self.head_dim).transpose(1, 2)
                scores = q @ k.transpose(-2, -1) / self.embed_size**0.5
                weights = torch.softmax(scores + self.bias, dim=-1)
                return (weights @ v).transpose(1, 2).reshape(n, length, self.embed_size)

        def small(pretrained=True):
            model = MultiHead(64, 8)
            model.load_state_dict(load_state_dict_from_url("https://example.org/small.pt"))
            return model
    """,
    "an affinity of two texts, read both ways": """
        class Coattention(nn.Module):
            def __init__(self, d, heads):
                super().__init__()
                self.heads, self.one, self.two = heads, nn.Linear(d, d), nn.Linear(d, d)
                self.left, self.right = nn.Linear(d, d), nn.Linear(d, d)

            def split(self, x):
                return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

            def forward(self, a, b, hidden):
                scores = torch.matmul(self.split(self.one(a)), self.split(self.two(b)).transpose(2, 3))
                scores = scores.masked_fill(hidden, -math.inf)
                of_a = F.softmax(scores, dim=3) @ self.split(self.right(b))
                of_b = F.softmax(scores, dim=2).transpose(2, 3) @ self.split(self.left(a))
                return of_a, of_b
    """,
    "two pictures that are compared, one after the other": """
        class Changes(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.read = nn.MultiheadAttention(d, 8, batch_first=True)

            def forward(self, pictures, details):
                read = []
                for index in range(2):
                    tokens = pictures[:, index]
                    read.append(self.read(tokens, details, details, need_weights=False)[0])
                return torch.cat(read, dim=-1)
    """,
    "a mask that is filled in float32, and converted to the dtype of scores as -inf": """
        def attend(q, k, v, hidden, alibi):
            mask = (hidden * 1.0).masked_fill(hidden, float("-1e9")).to(q.dtype)
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + alibi
            return torch.softmax(scores + mask, dim=-1) @ v
    """,
    "heads and queries that are counted to pick the best of them": """
        class Sparse(nn.Module):
            def __init__(self, d, n_heads):
                super().__init__()
                self.n_heads, self.q, self.k, self.v = n_heads, nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def split(self, x):
                return x.view(x.size(0), x.size(1), self.n_heads, -1).transpose(1, 2)

            def forward(self, x, best):
                q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
                b, heads, n, d = q.shape
                q = q[torch.arange(b)[:, None, None], torch.arange(heads)[None, :, None], best]
                return F.scaled_dot_product_attention(q, k, v)
    """,
    "examples of different lengths": """
        def paged(query, k_cache, v_cache, tables, lengths):
            out = torch.zeros_like(query)
            for i in range(query.size(0)):
                q, keys, values = query[i], [], []
                for j in range(int(lengths[i])):
                    keys.append(k_cache[tables[i, j]])
                    values.append(v_cache[tables[i, j]])
                keys, values = torch.stack(keys, dim=0), torch.stack(values, dim=0)
                out[i] = F.scaled_dot_product_attention(q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1))
            return out

        def unpadded(q, k, v, mask):
            outputs = []
            for i in range(q.size(0)):
                valid = int(mask[i].sum())
                outputs.append(F.scaled_dot_product_attention(q[i, :, :valid], k[i, :, :valid], v[i, :, :valid]))
            return outputs
    """,
    "attention in pieces for a tower of pictures": """
        from transformers import AttentionInterface

        def chunked_vision_attention(module, query, key, value, attention_mask, **options):
            parts = [eager(module, one, key, value, attention_mask, **options) for one in query.split(512, dim=2)]
            return torch.cat(parts, dim=1), None

        def install(visual):
            AttentionInterface.register("chunked", chunked_vision_attention)
            visual.set_attn_implementation("chunked")
    """,
    "the entropy of a choice": """
        class Decision(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.scorer = nn.Linear(d, 1)
                self.attention = nn.MultiheadAttention(d, 8, batch_first=True)

            def forward(self, options, hidden):
                x = self.attention(options, options, options, need_weights=False)[0]
                logits = self.scorer(x).squeeze(-1).float().masked_fill(hidden, -1e4)
                p = torch.softmax(logits, -1)
                return logits, -(p * torch.log(p.clamp_min(1e-9))).sum(-1)
    """,
    "a reference, with keys repeated": """
        def agrees(ours, q, k, v):
            ref = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
            return torch.allclose(ours(q, k, v), ref, atol=1e-3)
    """,
    "a layer for nn.TransformerEncoder, and a function in the place of torch's": """
        class EncoderLayer(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.self_attn, self.linear = nn.MultiheadAttention(d, 8), nn.Linear(d, d)

            def forward(self, src, src_mask=None, src_key_padding_mask=None):
                return self.linear(src + self.self_attn(src, src, src, need_weights=False)[0])

        def unmasked_attention(query, key, value, attn_mask=None, dropout_p=None, is_causal=None):
            scores = torch.bmm(query, key.transpose(-1, -2)) / math.sqrt(query.size(-1))
            return torch.bmm(scores.softmax(dim=-1), value)
    """,
    "a mask that no caller of the file passes": """
        class CrossAttention(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x, context=None, mask=None):
                context = x if context is None else context
                return F.scaled_dot_product_attention(self.q(x), self.k(context), self.v(context))
    """,
    "one query with a cache, as the callers have it, and a function that does without a cache": """
        class Attention(nn.Module):
            def __init__(self, d, heads):
                super().__init__()
                self.heads, self.qkv = heads, nn.Linear(d, 3 * d)

            def forward(self, x, cache=None):
                q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
                if cache is not None:
                    k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=(cache is None))
                return out.transpose(1, 2).flatten(2), (k, v)

        def evaluate_briefly(model, tokens, steps):
            '''Greedy, with no KV cache: the texts of the evaluation are short.'''
            for _ in range(steps):
                tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
            return tokens
    """,
    "two masks whose sum is limited, and a name that has a mask function": """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        def joined(q, k, v, dtype, hidden, padding):
            lowest = torch.finfo(dtype).min
            sparse = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, lowest)
            padded = (1.0 - padding[:, None, None, :].to(dtype)) * lowest
            return F.scaled_dot_product_attention(q, k, v, attn_mask=(sparse + padded).clamp_min(lowest))

        def in_float32(module, query, key, value, attention_mask=None, **options):
            return sdpa(module, query.float(), key.float(), value.float(), attention_mask, **options)

        ALL_ATTENTION_FUNCTIONS.register("sdpa", in_float32)
    """,
    "an attention function whose kernel has its own causal mask, as its text says": """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        def kernel_attention(module, query, key, value, attention_mask=None, **options):
            '''The kernel does causal masking internally; a mask of two axes gives the lengths.'''
            lengths = None if attention_mask is None else attention_mask.sum(-1)
            return kernel(query, key, value, lengths), None

        ALL_ATTENTION_FUNCTIONS.register("kernel", kernel_attention)
    """,
    "cross-attention with the mask of decoder and encoder": """
        class DecoderLayer(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.own = nn.MultiheadAttention(dim, heads, batch_first=True)
                self.cross = nn.MultiheadAttention(dim, heads, batch_first=True)

            def forward(self, x, enc_outputs, dec_self_mask, dec_enc_mask):
                x = x + self.own(x, x, x, attn_mask=dec_self_mask, need_weights=False)[0]
                return x + self.cross(x, enc_outputs, enc_outputs, attn_mask=dec_enc_mask, need_weights=False)[0]
    """,
    "a mask that is said to be not implemented": """
        def rows_and_columns(q, k, v, key_mask, attn_mask=None):
            '''Attention over rows.

            - key_mask: True where a key is hidden
            - attn_mask: Not Implemented
            '''
            scores = (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5).masked_fill(key_mask[:, None], float("-inf"))
            return scores.softmax(dim=-1) @ v

        def attend(q, k, v, key_mask, attn_mask=None):
            return rows_and_columns(q, k, v, key_mask, attn_mask=attn_mask)
    """,
    "a layer with one mask more than it reads, which nobody makes": """
        class Layer(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.attention = nn.MultiheadAttention(dim, 8)

            def forward(self, tgt, memory, tgt_key_padding_mask=None, memory_key_padding_mask=None):
                out = self.attention(tgt, memory, memory, key_padding_mask=memory_key_padding_mask, need_weights=False)
                return tgt + out[0]

        class Decoder(nn.Module):
            def __init__(self, dim, depth):
                super().__init__()
                self.layers = nn.ModuleList([Layer(dim) for _ in range(depth)])

            def forward(self, tgt, memory, tgt_key_padding_mask=None, memory_key_padding_mask=None):
                for layer in self.layers:
                    tgt = layer(tgt, memory, tgt_key_padding_mask=tgt_key_padding_mask,
                                memory_key_padding_mask=memory_key_padding_mask)
                return tgt
    """,
    "the only layer of a model, with a causal mask": """
        class Readable(nn.Module):
            def __init__(self, dim, length):
                super().__init__()
                self.qkv = nn.Linear(dim, 3 * dim)
                self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))

            def forward(self, x):
                q, k, v = self.qkv(x).chunk(3, dim=-1)
                weights = (q @ k.transpose(-2, -1) * q.size(-1) ** -0.5 + self.mask).softmax(dim=-1)
                return weights @ v, weights

        class Forecast(nn.Module):
            def __init__(self, dim, length):
                super().__init__()
                self.recurrent = nn.LSTM(dim, dim, batch_first=True)
                if torch.jit.is_scripting():
                    self.attention = Readable(dim, length)
                else:
                    self.attention = torch.jit.script(Readable(dim, length))

            def forward(self, x):
                return self.attention(self.recurrent(x)[0])
    """,
    "the dot products of one decoder state, as Luong has them": """
        class Dots(nn.Module):
            def __init__(self, dim, source):
                super().__init__()
                self.query = nn.Linear(dim, dim)
                self.memory = nn.Linear(source, dim)

            def forward(self, state, encoded):
                query = self.query(state).unsqueeze(2)
                keys = self.memory(encoded)
                weights = torch.bmm(keys, query).squeeze(2).softmax(dim=1)
                return torch.bmm(weights.unsqueeze(1), keys).squeeze(1)
    """,
    "keys that decay with their distance from the last position": """
        def attend(q, k, v, prev_key, prev_value, sin, cos, decay):
            k = torch.cat([prev_key, k], dim=1)
            v = torch.cat([prev_value, v], dim=1)
            k = apply_rotary_pos_emb(k, sin, cos, scale=1 / decay)
            q = apply_rotary_pos_emb(q, sin[-q.shape[1]:], cos[-q.shape[1]:], scale=decay[-q.shape[1]:])
            return F.scaled_dot_product_attention(q, k, v), (k, v)
    """,
    "a mask that is converted wherever there is one": """
        def expanded(mask, dtype):
            hidden = 1.0 - mask[:, None, None, :].to(dtype)
            return hidden.masked_fill(hidden.bool(), torch.finfo(dtype).min)

        def attend(x, memory, words):
            padding = (words > 0).float()
            if memory is not None and padding is not None:
                padding = expanded(padding, x.dtype)
            scores = x @ memory.transpose(-2, -1) / math.sqrt(x.size(-1)) + padding
            return F.softmax(scores, dim=-1) @ memory
    """,
    "halves rotated by a cached table, joined along the features": """
        class Rotary(nn.Module):
            def forward(self, x):
                if self.cos_cached is None:
                    self.cos_cached, self.sin_cached = tables(x.shape[1], x.shape[3])
                return self.cos_cached[None, :, None, :], self.sin_cached[None, :, None, :]

        def turned(x, cos, sin):
            half = x.shape[3] // 2
            one, other = x[..., :half], x[..., half:]
            return torch.cat([one * cos + other * sin, other * cos - one * sin], 3)

        class Attention(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads = heads
                self.qkv = nn.Linear(dim, 3 * dim)
                self.rotary = Rotary()

            def forward(self, x):
                b, n, d = x.size()
                q, k, v = (one.view(b, n, self.heads, d // self.heads) for one in self.qkv(x).split(d, dim=2))
                cos, sin = self.rotary(q)
                q, k = turned(q, cos, sin), turned(k, cos, sin)
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d)
    """,
    "a triangle in the branch without a cache": """
        def attend(q, k, v, past_k, past_v, use_cache):
            if use_cache:
                k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            new, known = q.size(2), k.size(2)
            if use_cache:
                future = torch.ones(new, known, dtype=torch.bool, device=q.device).triu(known - new + 1)
            else:
                future = torch.ones(new, known, dtype=torch.bool, device=q.device).triu(1)
            return scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ v
    """,
    "a cache that is refused": """
        def attend(q, k, v, past_key_value=None):
            assert past_key_value is None, "training alone"
            if past_key_value is not None:
                k = torch.cat([past_key_value[0], k], dim=2)
                v = torch.cat([past_key_value[1], v], dim=2)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """,
    "a mask of the caller, whose sum is bounded, beside a causal path": """
        def attend(self, q, k, v, attention_mask=None):
            if self.training:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))
            if attention_mask is not None:
                scores = scores + attention_mask
                scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
            return F.softmax(scores, dim=-1) @ v
    """,
    "generation without the cache, as an option": """
        class Gpt(nn.Module):
            def generate(self, idx, steps, use_kv_cache=True):
                if not use_kv_cache:
                    for _ in range(steps):
                        logits = self(idx)
                        idx = torch.cat([idx, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
                    return idx
                return self.generate_with_keys(idx, steps)
    """,
    "generation by a model without keys": """
        class Pairs(nn.Module):
            def __init__(self, vocabulary):
                super().__init__()
                self.table = nn.Embedding(vocabulary, vocabulary)

            def forward(self, idx):
                return self.table(idx)

            def generate(self, idx, steps):
                for _ in range(steps):
                    logits = self(idx)
                    following = torch.multinomial(F.softmax(logits[:, -1, :], dim=-1), num_samples=1)
                    idx = torch.cat((idx, following), dim=1)
                return idx
    """,
    "captions by a decoder of any kind": """
        class Captioner(nn.Module):
            def __init__(self, encoder, decoder):
                super().__init__()
                self.encoder, self.decoder = encoder, decoder

            def sample(self, images, start, steps):
                features, words = self.encoder(images), start
                for _ in range(steps):
                    outputs = self.decoder(features, words)
                    probabilities = torch.softmax(outputs[:, -1, :], dim=-1)
                    words = torch.cat([words, torch.multinomial(probabilities, 1)], dim=1)
                return words
    """,
    "values with positions in space": """
        def attend(q, k, v, q_pos, k_pos):
            q = apply_rotary_pos_emb(q, q_pos)
            k = apply_rotary_pos_emb(k, k_pos)
            v = apply_rotary_pos_emb(v, k_pos)
            scores = torch.einsum("b i d, b i j d -> b i j", q, k) * q.size(-1) ** -0.5
            return torch.einsum("b i j, b i j d -> b i d", scores.softmax(dim=-1), v)
    """,
    "keys that are kept as they are, and rotated by where they are in a window": """
        def attend(self, q, k, v, past_key_value, position_ids):
            if past_key_value is not None:
                k = torch.cat([past_key_value[0], k], dim=2)
                v = torch.cat([past_key_value[1], v], dim=2)
            past_key_value = (k, v)
            cos, sin = self.rotary_emb(v, seq_len=k.shape[-2])
            places = torch.arange(k.shape[-2], device=k.device).unsqueeze(0)
            k = apply_rotary_pos_emb_single(k, cos, sin, places)
            q = apply_rotary_pos_emb_single(q, cos, sin, position_ids)
            return F.scaled_dot_product_attention(q, k, v), past_key_value
    """,
    "a test, with what others are compared with": """
        import pytest
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def masked(q, k, v, rule):
            mask = create_block_mask(rule, q.size(0), q.size(1), q.size(2), k.size(2))
            return flex_attention(q, k, v, block_mask=mask)

        @pytest.mark.parametrize("rule", [None])
        def test_masks(rule):
            assert masked(*torch.randn(3, 1, 2, 8, 4), rule).shape == (1, 2, 8, 4)
    """,
    "an engine that finds the padding by itself": """
        class Engine:
            def generate(self, inputs, steps):
                seen = np.asarray(inputs) != self.config.pad_token_id
                return self.run(inputs, seen, steps)

        def complete(path, prompts, steps):
            tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
            inputs = tokenizer(prompts, padding="max_length", max_length=64).input_ids
            engine = Engine(path)
            return engine.generate(inputs, steps)
    """,
    "generation that stands in for a missing one": """
        class Server:
            def fallback_generate(self, idx, steps):
                for _ in range(steps):
                    recent = idx[:, -self.block_size:]
                    logits = self.gpt(recent)
                    idx = torch.cat((idx, logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
                return idx
    """,
    "a text that is source and target": """
        def continued(transformer, text, steps):
            for _ in range(steps):
                logits = transformer(text, text)
                text = torch.cat([text, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
            return text
    """,
    "copied keys, as one of two ways": """
        def attend(q, k, v, grouped, repeats):
            if grouped:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """,
    "masked attention that is given its mask": """
        from torch.nn.attention.flex_attention import flex_attention

        flex_attention = torch.compile(flex_attention)

        class MaskedAttention(nn.Module):
            def forward(self, q, k, v, block_mask):
                if block_mask is None:
                    return F.scaled_dot_product_attention(q, k, v)
                return flex_attention(q, k, v, block_mask=block_mask)
    """,
    "a number of which the text says why": """
        def lowest(dtype):
            # Intentionally one number for all dtypes: larger ones cannot be written on some devices.
            _ = dtype
            return -1e4

        def attend(q, k, v, keep):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(~keep, lowest(q.dtype))
            return F.softmax(scores, dim=-1) @ v
    """,
    "causal where there are as many queries as keys": """
        def attend(q, k, v, past_k, past_v):
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
            queries, keys = q.size(2), k.size(2)
            if queries == keys:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            keep = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    """,
    "a mask that is only handed on": """
        class Windowed(nn.Module):
            def forward(self, x, mask=None):
                weights = (x @ x.transpose(-2, -1) * x.size(-1) ** -0.5).softmax(dim=-1)
                return weights @ x

        class Compared(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = Windowed()

            def forward(self, x, mask=None):
                return self.attention(x, mask)
    """,
    "cosines, scaled up": """
        def read(x, slots, values, dim):
            scores = torch.matmul(F.normalize(x, dim=-1), F.normalize(slots, dim=-1).transpose(-2, -1)) * math.sqrt(dim)
            return torch.softmax(scores, dim=-1) @ values
    """,
    "weights that are multiplied by the mask again": """
        def read(q, k, v, mask):
            scores = torch.einsum("bsd,bkd->bsk", q, k) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(mask[:, None, :] <= 0, -1e4)
            weights = F.softmax(scores, dim=-1) * mask[:, None, :]
            return torch.einsum("bsk,bkd->bsd", weights, v)
    """,
    "what a cache is compared with": """
        def bench_uncached(model, idx, steps):
            for _ in range(steps):
                logits = model(idx)
                idx = torch.cat([idx, logits[:, -1, :].argmax(dim=-1, keepdim=True)], dim=1)
            return idx
    """,
    "dot products by name": """
        def dot_attention(query, key, value):
            weights = F.softmax(torch.matmul(query, key.transpose(2, 1)), dim=-1)
            return torch.matmul(weights, value), weights
    """,
    "rows of padded queries, which nothing reads": """
        def attend(q, k, v, padded, hidden):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores[padded[0], :, padded[1], :] = -10000.0
            scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
            return F.softmax(scores, dim=-1) @ v
    """,
    "a scale that a published model has": """
        from einops import rearrange

        class ConvolvedAttention(nn.Module):
            \"\"\"Adapted from the code of a published model.\"\"\"

            def __init__(self, dim, width, heads):
                super().__init__()
                self.heads = heads
                self.scale = width**-0.5
                self.q, self.k, self.v = nn.Linear(dim, width), nn.Linear(dim, width), nn.Linear(dim, width)

            def forward(self, x):
                q = rearrange(self.q(x), "b s (h d) -> b h s d", h=self.heads)
                k = rearrange(self.k(x), "b s (h d) -> b h s d", h=self.heads)
                v = rearrange(self.v(x), "b s (h d) -> b h s d", h=self.heads)
                weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scale).softmax(dim=-1)
                return torch.einsum("bhqk,bhkd->bhqd", weights, v)
    """,
    "a loss over steps": """
        def rollout_loss(model, x, start, steps):
            context, predicted = x[:, :start].clone(), []
            for _ in range(steps):
                weights, means = model(context)
                following = (weights[:, -1] * means[:, -1]).sum(dim=-1, keepdim=True)
                predicted.append(following)
                context = torch.cat([context, following], dim=1)
            return (torch.cat(predicted, dim=1) - x[:, start : start + steps]).abs().mean()
    """,
    "tokens in other orders": """
        class AnyOrderGPT(nn.Module):
            def forward(self, idx, targets=None, orders=None):
                x = self.read(idx, self.random_orders(idx) if orders is None else orders)
                return self.lm_head(F.scaled_dot_product_attention(x, x, x, is_causal=True)), None

            @torch.no_grad()
            def generate(self, idx, steps):
                for _ in range(steps):
                    logits, _ = self(idx)
                    idx = torch.cat((idx, logits[:, -1].argmax(dim=-1, keepdim=True)), dim=1)
                return idx
    """,
    "a table of tokens with its settings": """
        class Settings:
            def __init__(self, words, width):
                self.words, self.width = words, width

        class GPT(nn.Module):
            def __init__(self, settings: Settings):
                super().__init__()
                self.settings = settings
                self.words = nn.Embedding(settings.words, settings.width)
                self.lm_head = nn.Linear(settings.width, settings.words)

            def forward(self, idx):
                return self.lm_head(self.words(idx)), None

            def generate(self, idx, steps):
                for _ in range(steps):
                    logits, _ = self(idx)
                    probs = F.softmax(logits[:, -1, :], dim=-1)
                    idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
                return idx
    """,
    "a prompt that is causal, and steps of one token": """
        class Model(nn.Module):
            def __init__(self, words, dim):
                super().__init__()
                self.embed_tokens, self.positions = nn.Embedding(words, dim), nn.Embedding(512, dim)
                self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

            def forward(self, tokens, positions):
                x = self.embed_tokens(tokens) + self.positions(positions)
                q, k, v = self.q(x), self.k(x), self.v(x)
                if x.shape[1] == 1:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=False)
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        class LanguageModel(nn.Module):
            def __init__(self, words, dim):
                super().__init__()
                self.model = Model(words, dim)
                self.lm_head = nn.Linear(dim, words)

            def forward(self, tokens, labels=None):
                logits = self.lm_head(self.model(tokens, torch.arange(tokens.size(1))))
                shifted, targets = logits[..., :-1, :], labels[..., 1:]
                return F.cross_entropy(shifted.flatten(0, 1), targets.flatten())
    """,
    "functions that are called in each other's place": """
        def flash(q, k, v, dropout_p=0.0, causal=True, window_size=(-1, -1), softcap=None):
            return flash_kernel(q, k, v, dropout_p, causal, window_size, softcap)

        def plain(q, k, v, dropout_p=0.0, causal=True, window_size=(-1, -1), softcap=None):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=causal)

        def attend(q, k, v, chosen, window_size, softcap):
            return chosen(q, k, v, causal=True, window_size=window_size, softcap=softcap)
    """,
    "a series that is converted elsewhere": """
        class Reprogrammed(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads = heads
                self.query_projection = nn.Linear(dim, dim)

            def forward(self, target, source):
                b, n, _ = target.shape
                target = self.query_projection(target).view(b, n, self.heads, -1)
                scores = torch.einsum("blhe,she->bhls", target, source) * target.size(-1) ** -0.5
                return torch.einsum("bhls,she->blhe", torch.softmax(scores, dim=-1), source)

        class Forecaster(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.layer = Reprogrammed(dim, heads)

            def forward(self, series, words):
                return self.layer(series.to(torch.bfloat16), words)
    """,
    "a triangle that is changed afterwards": """
        class CausalSelfAttention(nn.Module):
            def __init__(self, dim, length, joined):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
                self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
                self.mask.squeeze()[:, joined - 1 :: joined] = 0

            def forward(self, x):
                n = x.size(1)
                scores = self.q(x) @ self.k(x).transpose(-2, -1) * x.size(-1) ** -0.5
                scores = scores.masked_fill(self.mask[:, :, :n, :n] == 0, float("-inf"))
                return F.softmax(scores, dim=-1) @ self.v(x)
    """,
    "positions in a maximum, no scores": """
        def mask_of(loss_mask):
            positions = torch.arange(loss_mask.size(1))
            last = positions.unsqueeze(0).masked_fill(~loss_mask, -1e8).max(dim=1).values
            mask = positions.unsqueeze(1) >= positions.unsqueeze(0)
            return torch.where(last.view(-1, 1, 1) < positions.view(1, 1, -1), False, mask)

        def attend(q, k, v, loss_mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores + torch.zeros_like(scores).masked_fill(~mask_of(loss_mask), float("-inf"))
            return torch.softmax(scores, dim=-1) @ v
    """,
    "a number that bfloat16 holds": """
        LOWEST = -2.3e38

        def attend(q, k, v, mask):
            scores = torch.einsum("btnh,bsnh->bnts", q, k) * q.size(-1) ** -0.5
            scores = torch.where(mask[:, None], scores, LOWEST).type(torch.float32)
            return torch.einsum("bnts,bsnh->btnh", torch.softmax(scores, dim=-1).type_as(v), v)
    """,
    "a mask that is converted after it was multiplied": """
        def attend(q, k, v, mask):
            scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(q.size(-1))
            scores += (mask.to(torch.int64) * -1e9).to(scores.dtype)
            return torch.matmul(F.softmax(scores, -1), v)
    """,
    "generation that attends in both directions": """
        def generate(self, prior, length):
            tokens = prior
            for _ in range(length):
                result, _ = self.decoder(tokens, None)
                result = self.transformer_head(result).softmax(-1)
                following = torch.multinomial(result[:, -1], 1)
                tokens = torch.cat((tokens, following), dim=-1)
            return tokens
    """,
    "sampling that says that it is slow": """
        @torch.inference_mode()
        def generate(transformer, idx, steps):
            \"\"\"A very inefficient way of sampling, with no key/value cache.\"\"\"
            for _ in range(steps):
                logits = transformer(idx)[:, -1, :]
                idx = torch.cat((idx, logits.argmax(dim=-1, keepdim=True)), dim=1)
            return idx
    """,
    "texts padded on the left for a recurrent model": """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        def answers(texts):
            model = AutoModelForCausalLM.from_pretrained("rwkv-5-world")
            tokenizer = AutoTokenizer.from_pretrained("rwkv-5-world", padding_side="left")
            inputs = tokenizer(texts, return_tensors="pt", padding=True)
            return model.generate(inputs["input_ids"], max_new_tokens=128)
    """,
    "any vectors, rotated": """
        class Rotary(nn.Module):
            def rotated(self, v, positions):
                angles = (positions.unsqueeze(-1) * self.frequencies).expand(*v.shape)
                v = apply_rotary(angles, v)
                return v

        def attend(q, keys, values, rotary, positions):
            return F.scaled_dot_product_attention(rotary.rotated(q, positions), rotary.rotated(keys, positions), values)
    """,
    "one of several kernels": """
        class Grouped(nn.Module):
            def forward(self, q, k, v):
                k = k.repeat_interleave(self.groups, dim=1)
                v = v.repeat_interleave(self.groups, dim=1)
                if self.kernel == "triton":
                    return triton_attention(q, k, v)
                elif self.kernel == "torch":
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
                raise ValueError(self.kernel)
    """,
    "padding that `generate` finds by itself": """
        from transformers import AutoTokenizer

        def complete(model, context, pad_token_id):
            tokenizer = AutoTokenizer.from_pretrained("gpt2", padding_side="left")
            input_ids = tokenizer(context, padding=True, return_tensors="pt").input_ids
            return model.generate(input_ids, pad_token_id=pad_token_id, max_length=128)
    """,
    "a wrapper that is given its model": """
        class Wrapper(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net = net  # a Transformer of any kind

            def generate(self, tokens, steps):
                for _ in range(steps):
                    logits = self.net(tokens)[:, -1, :]
                    sample = torch.multinomial(F.softmax(logits, dim=-1), 1)
                    tokens = torch.cat((tokens, sample), dim=-1)
                return tokens
    """,
    "an encoder that is read again": """
        class SpeechEncoder(nn.Module):
            def __init__(self, dim, heads, classes):
                super().__init__()
                self.layers = nn.ModuleList([EncoderLayer(dim, heads) for _ in range(6)])
                self.output = nn.Linear(dim, classes)

            def sampled(self, seq, steps):
                for _ in range(steps):
                    y, _ = self.forward(seq)
                    following = torch.multinomial(F.softmax(y[:, -1, :], dim=-1), 1)
                    seq = torch.cat([seq, following], dim=1)
                return seq
    """,
    "a module that raises": """
        try:
            import fused_kernels
            if not hasattr(fused_kernels, "attention"):
                raise ImportError("fused_kernels is too old")
            raise ImportError("it is not used")
        except ImportError:
            fused_kernels = None

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v)
    """,
    "the steps of time are the positions": """
        class DecisionTransformer(nn.Module):
            def __init__(self, states, actions, width):
                super().__init__()
                self.embed_state = nn.Linear(states, width)
                self.embed_timestep = nn.Embedding(1024, width)
                self.transformer = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2), 2)
                self.predict_action = nn.Linear(width, actions)

            def forward(self, timesteps, states):
                x = self.embed_state(states) + self.embed_timestep(timesteps)
                return self.predict_action(self.transformer(x.permute(1, 0, 2)).permute(1, 0, 2)[:, -1, :])
    """,
}
NO_TEXTBOOK = {
    "the other path of a fused call": """
        def attend(q, k, v, fused, scale):
            if fused:
                return F.scaled_dot_product_attention(q, k, v, scale=scale)
            weights = (q @ k.transpose(-2, -1) * scale).softmax(dim=-1)
            return weights @ v
    """,
    "features that attend to features": """
        class Channels(nn.Module):
            def __init__(self, dim, groups):
                super().__init__()
                self.groups = groups
                self.qkv = nn.Linear(dim, dim * 3)

            def forward(self, x):
                B, N, C = x.shape
                qkv = self.qkv(x).reshape(B, N, 3, self.groups, C // self.groups).permute(2, 0, 3, 1, 4)
                q, k, v = qkv.unbind(0)
                weights = ((q * N ** -0.5).transpose(-1, -2) @ k).softmax(dim=-1)
                return (weights @ v.transpose(-1, -2)).transpose(-1, -2)
    """,
    "weights that are returned as an option": """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.dropout = nn.Dropout(0.1)

            def forward(self, q, k, v, output_attentions=False):
                scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
                weights = nn.functional.softmax(scores, dim=-1)
                weights = self.dropout(weights)
                context = torch.matmul(weights, v)
                outputs = (context, weights) if output_attentions else (context,)
                return outputs

        class CrossLayer(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = Attention()

            def forward(self, x, memory, output_attentions=False):
                outputs = self.attention(x, memory, memory, output_attentions=output_attentions)
                if output_attentions:
                    weights = outputs[1]
                x = x + outputs[0]
                outputs = (x, weights) if output_attentions else (x,)
                return outputs

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.cross = CrossLayer()

            def forward(self, x, memory):
                return self.cross(x, memory, output_attentions=False)[0]
    """,
    "the path beside a fused kernel, which a method calls": """
        class Attend(nn.Module):
            def __init__(self, scale, fused):
                super().__init__()
                self.scale, self.fused = scale, fused

            def on_the_gpu(self, q, k, v, mask):
                with torch.backends.cuda.sdp_kernel(enable_math=False):
                    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

            def forward(self, q, k, v, mask=None):
                if self.fused:
                    return self.on_the_gpu(q, k, v, mask)
                scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
                if mask is not None:
                    scores = scores.masked_fill(~mask, -torch.finfo(scores.dtype).max)
                return torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)
    """,
    "a formula that is written out to be read": """
        class SelfAttention(nn.Module):
            \"\"\"Self-attention; an explicit implementation, to show how it works.\"\"\"

            def forward(self, q, k, v):
                return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(dim=-1) @ v
    """,
    "features that attend to features, of parts of one projection": """
        class CrossCovariance(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)
                self.temperature = nn.Parameter(torch.ones(heads, 1, 1))

            def forward(self, x):
                B, N, C = x.shape
                qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
                q, k, v = qkv[0], qkv[1], qkv[2]
                q, k, v = q.transpose(-2, -1), k.transpose(-2, -1), v.transpose(-2, -1)
                q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
                weights = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(dim=-1)
                return (weights @ v).permute(0, 3, 1, 2).reshape(B, N, C)
    """,
    "weights that are constants for the gradients": """
        def expected(x, table):
            p = torch.softmax(x @ table.T, dim=-1).detach()
            return p @ table
    """,
    "weights that are constants in the product": """
        def expected(x, table):
            p = torch.softmax(x @ table.T, dim=-1)
            return p.detach() @ table
    """,
    "vectors without features": """
        def attend(qkv):
            q, k, v = qkv.unbind(-1)
            return (q @ k.transpose(-1, -2)).softmax(dim=-1) @ v
    """,
    "a kernel multiplied by the inverse of another one": """
        def nystrom(q, k, landmarks_q, landmarks_k):
            one = F.softmax(q @ landmarks_k.transpose(-1, -2), dim=-1)
            two = F.softmax(landmarks_q @ landmarks_k.transpose(-1, -2), dim=-1)
            return one @ torch.linalg.pinv(two)
    """,
}
IMPORTS = "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


PACKED = """
def packed(q, k, v, groups, heads):
    k = k[:, :, None, :].repeat(1, 1, groups, 1).reshape(-1, heads, q.size(-1))
    v = v[:, :, None, :].repeat(1, 1, groups, 1).reshape(-1, heads, q.size(-1))
    q, k, v = (one.transpose(0, 1) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""


def test_heads_that_are_repeated_in_place_are_not_tiled():
    assert [one.code for one in diagnose(IMPORTS + PACKED, selection=MISTAKES)] == ["ATT607"]


@pytest.mark.parametrize("name", CORRECT)
def test_correct_code_has_no_mistakes(name):
    assert diagnose(IMPORTS + textwrap.dedent(CORRECT[name]), selection=MISTAKES) == []


@pytest.mark.parametrize("name", NO_TEXTBOOK)
def test_what_is_no_textbook_formula_has_no_hint(name):
    assert diagnose(IMPORTS + textwrap.dedent(NO_TEXTBOOK[name])) == []


UNUSED_WEIGHTS = """
class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 8, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]
"""


@pytest.mark.parametrize("path", ["tests/layers.py", "project/bench/layers.py", "test_layers.py", "layers_test.py"])
def test_what_a_test_costs_is_a_hint_that_says_why(path):
    (finding,) = diagnose(IMPORTS + UNUSED_WEIGHTS, path=path)
    assert finding.severity is Severity.HINT
    assert finding.message.endswith(", unless this is a test, or what something is compared with")
    (finding,) = diagnose(IMPORTS + UNUSED_WEIGHTS, path="contest/latest.py")
    assert finding.severity is Severity.WARNING
    assert "unless" not in finding.message


def test_arrays_of_numpy_hold_what_float16_does_not():
    source = """
import numpy as np

class SelfAttention:
    def forward(self, x, attention_mask):
        q, k, v = x @ self.q, x @ self.k, x @ self.v
        scores = q @ k.T / np.sqrt(self.dim)
        scores[:, attention_mask == 0] = -1e9
        return self.softmax(scores) @ v

    def softmax(self, scores):
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)
"""
    assert diagnose(source, selection=MISTAKES) == []


UNROTATED = """
class Attention:
    def forward(self, query, key, value, kv_cache, step, tables):
        if step["stores"]:
            kv_cache["keys"][:, :, : step["length"]] = key
            kv_cache["values"][:, :, : step["length"]] = value
        else:
            key = torch.cat([kv_cache["keys"][:, :, : step["length"]], key], dim=2)
            value = torch.cat([kv_cache["values"][:, :, : step["length"]], value], dim=2)
        query = apply_rotary_emb(query, tables["query"])
        key = apply_rotary_emb(key, tables["key"])
        return F.scaled_dot_product_attention(query, key, value)
"""


def test_keys_that_a_cache_holds_as_they_are_cost_a_rotation_in_each_step():
    (finding,) = diagnose(IMPORTS + UNROTATED)
    assert (finding.code, finding.severity) == ("ATT502", Severity.HINT)
    assert finding.message.startswith("each step rotates all keys of the cache")
    rotated = UNROTATED.replace(
        "        if step", "        key = apply_rotary_emb(key, tables['new'])\n        if step"
    )
    (finding,) = diagnose(IMPORTS + rotated)
    assert (finding.code, finding.severity) == ("ATT502", Severity.WARNING)


def test_what_is_wrong_is_wrong_in_tests_too():
    assert [one.code for one in diagnose(IMPORTS + WRONG_AXIS, path="tests/layers.py", selection=MISTAKES)] == [
        "ATT111"
    ]


WRONG_AXIS = """
def attend(q, k, v):
    return (q @ k.mT * q.size(-1) ** -0.5).softmax(-2) @ v
"""


def test_this_repository_is_clean():
    settings = settings_near(ROOT)
    selection = RuleSelection(
        settings.select, settings.ignore, settings.min_severity or Severity.HINT, settings.per_file_ignores
    )
    paths = [ROOT / name for name in ("src", "tests", "benchmarks", "recipes") if (ROOT / name).exists()]
    files = python_files(paths, settings.exclude)
    assert len(files) > 500
    assert not any("planted" in path.parts for path in files)
    assert list(map(str, diagnose_files(files, selection))) == []
