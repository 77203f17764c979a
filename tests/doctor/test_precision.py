"""Correct code of other kinds that looks like a mistake, and is none; and this repository, which is clean."""

import textwrap
from pathlib import Path

import pytest

from regard.doctor import RuleSelection, Severity, diagnose
from regard.doctor.diagnosis import diagnose_files
from regard.doctor.doctor_settings import settings_near
from regard.doctor.source_discovery import python_files

ROOT = Path(__file__).parents[2]
MISTAKES = RuleSelection(least=Severity.WARNING)
CORRECT = {
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
}
IMPORTS = "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


@pytest.mark.parametrize("name", CORRECT)
def test_correct_code_has_no_mistakes(name):
    assert diagnose(IMPORTS + textwrap.dedent(CORRECT[name]), selection=MISTAKES) == []


def test_this_repository_is_clean():
    settings = settings_near(ROOT)
    selection = RuleSelection(settings.select, settings.ignore, settings.min_severity, settings.per_file_ignores)
    paths = [ROOT / name for name in ("src", "tests", "benchmarks", "recipes") if (ROOT / name).exists()]
    files = python_files(paths, settings.exclude)
    assert len(files) > 500
    assert not any("planted" in path.parts for path in files)
    assert list(map(str, diagnose_files(files, selection))) == []
