"""The same mistakes in other styles than the examples of the rules: each is found, and its correct twin is not.

A case is the code of a rule, a source with the mistake, and the pair of text that mends it.
"""

import textwrap

import pytest

from regard.doctor import RuleSelection, Severity, diagnose

IMPORTS = "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn, Tensor\n"
MISTAKES = RuleSelection(least=Severity.WARNING)

CASES = {
    "the mask of a question for its passage": (
        "ATT232",
        """
        class Reader(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, question, passage, question_mask, passage_mask):
                q, k, v = self.q(question), self.k(passage), self.v(passage)
                scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~question_mask[:, None, :], -torch.inf)
                return scores.softmax(-1) @ v
        """,
        ("~question_mask[", "~passage_mask["),
    ),
    "the padding of a text for a sound": (
        "ATT232",
        """
        class Listener(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.attn = nn.MultiheadAttention(d, 4, batch_first=True)

            def forward(self, text, audio, text_pad, audio_pad):
                return self.attn(text, audio, audio, key_padding_mask=text_pad, need_weights=False)[0]
        """,
        ("=text_pad", "=audio_pad"),
    ),
    "the lengths of films for their words": (
        "ATT232",
        """
        def attend(video, words, video_lengths, word_lengths):
            shown = (torch.arange(words.size(1)) < video_lengths[:, None]).unsqueeze(1)
            return F.scaled_dot_product_attention(video, words, words, attn_mask=shown)
        """,
        ("< video_lengths", "< word_lengths"),
    ),
    "causal with a padding mask only": (
        "ATT231",
        """
        class Attention(nn.Module):
            def __init__(self, causal):
                super().__init__()
                self.causal = causal

            def forward(self, q, k, v, key_mask=None):
                scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.size(-1) ** -0.5
                if key_mask is not None:
                    scores = scores.masked_fill(~key_mask[:, None, None, :], float("-inf"))
                    if self.causal:
                        future = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).triu(1)
                        scores = scores.masked_fill(future, float("-inf"))
                return torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)
        """,
        ("    if self.causal:\n                ", "    pass\n        if self.causal:\n"),
    ),
    "causal joined to a mask that may be missing": (
        "ATT231",
        """
        def attend(q, k, v, mask=None, is_causal=False):
            if mask is not None:
                mask = mask.bool()
                if is_causal:
                    mask = mask & torch.tril(torch.ones(q.size(-2), k.size(-2), dtype=torch.bool))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        """,
        ("attn_mask=mask)", "attn_mask=mask, is_causal=is_causal and mask is None)"),
    ),
    "causal added to a bias that may be missing": (
        "ATT231",
        """
        def attend(q, k, v, attn_mask=None, use_causal_mask=True):
            scores = q @ k.mT / math.sqrt(q.size(-1))
            if attn_mask is not None:
                if use_causal_mask:
                    attn_mask = attn_mask + torch.full(scores.shape[-2:], -torch.inf).triu(1)
                scores = scores + attn_mask
            return scores.softmax(-1) @ v
        """,
        (
            "    if attn_mask is not None:\n        if use_causal_mask:",
            "    attn_mask = 0.0 if attn_mask is None else attn_mask\n    if True:\n        if use_causal_mask:",
        ),
    ),
    "a bias at words, of ids that are not 0": (
        "ATT208",
        """
        def attend(q, k, v, input_ids):
            mask = (input_ids != 0).float()[:, None, None, :]
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + mask * -1e9
            return scores.softmax(-1) @ v
        """,
        ("(input_ids != 0)", "(input_ids == 0)"),
    ),
    "a bias at words, of the lowest number": (
        "ATT208",
        """
        def attend(q, k, v, tokens, pad_id):
            keep = (tokens != pad_id).unsqueeze(1).unsqueeze(2).to(q.dtype)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores += keep * torch.finfo(q.dtype).min
            return scores.softmax(-1) @ v
        """,
        ("keep * torch", "(1 - keep) * torch"),
    ),
    "a bias at words, one minus padding": (
        "ATT208",
        """
        class Attention(nn.Module):
            def __init__(self, dim, pad_idx):
                super().__init__()
                self.pad_idx, self.dim = pad_idx, dim
                self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

            def forward(self, x, ids):
                hidden = (1.0 - ids.eq(self.pad_idx).float()) * -1e9
                scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) / self.dim**0.5 + hidden[:, None]
                return torch.bmm(F.softmax(scores, dim=-1), self.v(x))
        """,
        ("(1.0 - ids.eq(self.pad_idx).float())", "ids.eq(self.pad_idx).float()"),
    ),
    "causal or words": (
        "ATT217",
        """
        def attend(q, k, v, tokens, pad_id):
            causal = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
            visible = causal | (tokens != pad_id)[:, None, None, :]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        """,
        ("causal | (", "causal & ("),
    ),
    "causal or words, of a tokenizer": (
        "ATT217",
        """
        def attend(q, k, v, attention_mask):
            i = torch.arange(q.size(-2))
            shown = torch.logical_or(i[:, None] >= i[None, :], attention_mask.bool()[:, None, None])
            scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~shown, float("-inf"))
            return scores.softmax(-1) @ v
        """,
        ("torch.logical_or(", "torch.logical_and("),
    ),
    "angles for heads, of one projection by index": (
        "ATT508",
        """
        def apply_rope(x, freqs):
            t = torch.arange(x.size(2), device=x.device)
            angles = torch.outer(t.float(), freqs)
            a, b, cos, sin = x[..., ::2], x[..., 1::2], angles.cos(), angles.sin()
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

        class Attention(nn.Module):
            def __init__(self, dim, num_heads):
                super().__init__()
                self.num_heads, self.qkv = num_heads, nn.Linear(dim, 3 * dim)
                self.register_buffer("freqs", 10000 ** -(torch.arange(0, dim // num_heads, 2) / (dim // num_heads)))

            def forward(self, x):
                b, n, c = x.shape
                qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 1, 3, 4)
                q, k, v = (one.transpose(1, 2) for one in (apply_rope(qkv[0], self.freqs), qkv[1], qkv[2]))
                return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        """,
        ("x.size(2)", "x.size(1)"),
    ),
    "angles for heads, of three chunks": (
        "ATT508",
        """
        class Attention(nn.Module):
            def __init__(self, dim, n_heads):
                super().__init__()
                self.n_heads, self.qkv = n_heads, nn.Linear(dim, 3 * dim)
                self.register_buffer("inv_freq", 10000 ** -(torch.arange(0, dim // n_heads, 2) / (dim // n_heads)))

            def rotate(self, x):
                positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
                angle = positions[:, None] * self.inv_freq
                cos, sin, (left, right) = angle.cos(), angle.sin(), x.chunk(2, -1)
                return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

            def forward(self, x):
                q, k, v = self.qkv(x).view(x.size(0), x.size(1), self.n_heads, -1).chunk(3, dim=-1)
                q, k, v = self.rotate(q), self.rotate(k), v
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        """,
        ("self.n_heads, -1).chunk(3, dim=-1)\n", "self.n_heads, -1).transpose(1, 2).chunk(3, dim=-1)\n"),
    ),
    "angles for heads, of axes that stand last": (
        "ATT508",
        """
        class Rope(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.register_buffer("freqs", 1e4 ** -(torch.arange(0, dim, 2) / dim))

            def forward(self, x):
                pos = torch.arange(x.shape[2]).to(x.device)
                theta = torch.einsum("n,d->nd", pos.float(), self.freqs).repeat(1, 2)
                one, two = x.chunk(2, dim=-1)
                return x * theta.cos() + torch.cat((-two, one), -1) * theta.sin()

        class Attention(nn.Module):
            def __init__(self, dim, nh):
                super().__init__()
                self.nh, self.qkv, self.rope = nh, nn.Linear(dim, 3 * dim), Rope(dim // nh)

            def forward(self, x):
                B, T, C = x.shape
                q, k, v = self.qkv(x).view(B, T, self.nh, 3, C // self.nh).unbind(dim=3)
                q, k, v = (one.permute(0, 2, 1, 3) for one in (self.rope(q), self.rope(k), v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        """,
        ("pos = torch.arange(x.shape[2])", "pos = torch.arange(x.shape[1])"),
    ),
    "windows as rows, of einops": (
        "ATT404",
        """
        from einops import rearrange

        class Stripes(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.attention = nn.MultiheadAttention(dim, 4)

            def forward(self, x):
                y = rearrange(x, "b c h w -> (b h) w c")
                return self.attention(y, y, y)[0]
        """,
        ("(dim, 4)", "(dim, 4, batch_first=True)"),
    ),
    "frames as rows": (
        "ATT404",
        """
        class Video(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.norm = nn.LayerNorm(dim)
                self.layer = nn.TransformerEncoderLayer(dim, 8)

            def forward(self, clip):
                batch, frames, patches, dim = clip.shape
                return self.layer(self.norm(clip.view(batch * frames, patches, dim)))
        """,
        ("(dim, 8)", "(dim, 8, batch_first=True)"),
    ),
    "windows of a picture as rows": (
        "ATT404",
        """
        class Windows(nn.Module):
            def __init__(self, dim, size):
                super().__init__()
                self.size, self.attn = size, nn.MultiheadAttention(dim, 4, dropout=0.1)

            def forward(self, x):
                B, H, W, C = x.shape
                n = self.size
                x = x.view(B, H // n, n, W // n, n, C).transpose(2, 3)
                x = x.reshape(B * (H // n) * (W // n), n * n, C)
                x = x + self.attn(x, x, x, need_weights=False)[0]
                return x
        """,
        ("dropout=0.1)", "dropout=0.1, batch_first=True)"),
    ),
    "heads and pixels flattened, scaled afterwards": (
        "ATT111",
        """
        def maps(query, key, hidden):
            weights = torch.einsum("bqhc,bhcyx->bqhyx", query, key) * query.size(-1) ** -0.5
            weights = weights.masked_fill(hidden[:, None, None], float("-inf"))
            return weights.flatten(2).softmax(dim=-1).view_as(weights)
        """,
        ("weights.flatten(2)", "weights.flatten(3)"),
    ),
    "heads and keys flattened, of which some are filled": (
        "ATT111",
        """
        def weights(q, k, padding=None):
            scores = torch.einsum("bihd,bjhd->bihj", q, k) / math.sqrt(q.shape[-1])
            if padding is not None:
                scores = scores.masked_fill(padding[:, None, None, :], -torch.inf)
            return F.softmax(torch.flatten(scores, 2), -1).reshape(scores.shape)
        """,
        ("F.softmax(torch.flatten(scores, 2), -1).reshape(scores.shape)", "F.softmax(scores, -1)"),
    ),
    "heads and places flattened, in float32": (
        "ATT111",
        """
        def attention_maps(q, memory):
            maps = torch.einsum("bnhd,bhdp->bnhp", q, memory).float().div(math.sqrt(q.size(3)))
            return maps.flatten(start_dim=2).softmax(-1).view(maps.shape)
        """,
        ("maps.flatten(start_dim=2).softmax(-1).view(maps.shape)", "maps.softmax(-1)"),
    ),
    "groups before heads, merged by flatten": (
        "ATT403",
        """
        def attend(q, k, v):
            groups = q.size(1) // k.size(1)
            k, v = (one[:, None].expand(-1, groups, -1, -1, -1).flatten(1, 2) for one in (k, v))
            scores = q @ k.mT / math.sqrt(q.size(-1))
            return scores.softmax(dim=-1) @ v
        """,
        ("one[:, None].expand(-1, groups, -1, -1, -1)", "one[:, :, None].expand(-1, -1, groups, -1, -1)"),
    ),
    "groups before heads, which stand after positions": (
        "ATT403",
        """
        def attend(q, k, v, n_rep):
            b, n, kv_heads, d = k.shape
            k = k.unsqueeze(2).expand(b, n, n_rep, kv_heads, d).reshape(b, n, n_rep * kv_heads, d)
            q, k, v = (one.transpose(1, 2) for one in (q, k, v.repeat_interleave(n_rep, dim=2)))
            return (q @ k.transpose(-2, -1) / d**0.5).softmax(-1) @ v
        """,
        ("k.unsqueeze(2).expand(b, n, n_rep, kv_heads, d)", "k.unsqueeze(3).expand(b, n, kv_heads, n_rep, d)"),
    ),
    "groups before heads, in a helper": (
        "ATT403",
        """
        def repeated(x, times):
            b, kv, n, d = x.shape
            return x.unsqueeze(1).repeat(1, times, 1, 1, 1).view(b, times * kv, n, d)

        def attend(q, k, v):
            times = q.shape[1] // k.shape[1]
            scores = q @ repeated(k, times).mT * q.shape[-1] ** -0.5
            return scores.softmax(dim=-1) @ repeated(v, times)
        """,
        ("x.unsqueeze(1).repeat(1, times, 1, 1, 1)", "x.unsqueeze(2).repeat(1, 1, times, 1, 1)"),
    ),
    "sizes of the split in a variable": (
        "ATT401",
        """
        class Attention(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads, self.head_dim = heads, dim // heads
                self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

            def forward(self, x):
                batch, length, dim = x.shape
                shape = (batch, self.heads, length, self.head_dim)
                q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
                y = F.scaled_dot_product_attention(q, k, v)
                return y.transpose(1, 2).reshape(batch, length, dim)
        """,
        (
            "self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)",
            "(f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))",
        ),
    ),
    "places for rows of the batch": (
        "ATT508",
        """
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
                self.words, self.wpe, self.block = nn.Embedding(vocabulary, dim), nn.Embedding(512, dim), Block(dim, 4)

            def forward(self, ids):
                places = torch.arange(ids.shape[0], device=ids.device)[:, None]
                return self.block(self.wpe(places) + self.words(ids))
        """,
        ("torch.arange(ids.shape[0], device=ids.device)[:, None]", "torch.arange(ids.shape[1], device=ids.device)"),
    ),
    "a dropout of a name, made in forward": (
        "ATT304",
        """
        class Reader(nn.Module):
            def __init__(self, dim, p):
                super().__init__()
                self.q, self.k, self.v, self.p = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim), p

            def forward(self, x):
                drop = nn.Dropout(self.p)
                scores = self.q(x) @ self.k(x).mT * x.shape[-1] ** -0.5
                return drop(scores.softmax(-1)) @ self.v(x)
        """,
        ("drop(scores.softmax(-1))", "F.dropout(scores.softmax(-1), self.p, self.training)"),
    ),
    "a dropout of torch.nn, called at once": (
        "ATT304",
        """
        def read(q, k, v):
            weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(2)), dim=2)
            return torch.bmm(torch.nn.Dropout(0.2)(weights), v)
        """,
        ("torch.nn.Dropout(0.2)(weights)", "weights"),
    ),
    "a dropout that waits for a caller that never comes": (
        "ATT305",
        """
        class Reader(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.mix = nn.Linear(dim, 3 * dim)
                self.attn_drop = nn.Dropout(0.1)

            def forward(self, x):
                q, k, v = self.mix(x).chunk(3, dim=-1)
                return torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), -1) @ v
        """,
        ("-1) @ v", "-1).mul(1) @ self.attn_drop(v)"),
    ),
    "heads of a fused projection, split by a view": (
        "ATT401",
        """
        class Reader(nn.Module):
            def __init__(self, dim, n_heads):
                super().__init__()
                self.n_heads, self.to_qkv = n_heads, nn.Linear(dim, 3 * dim)

            def forward(self, x):
                b, t, d = x.size()
                q, k, v = self.to_qkv(x).view(b, self.n_heads, t, -1).split(d // self.n_heads, -1)
                return F.scaled_dot_product_attention(q, k, v)
        """,
        ("view(b, self.n_heads, t, -1)", "view(b, t, self.n_heads, -1).transpose(1, 2)"),
    ),
    "heads first for flash-attn, fused": (
        "ATT406",
        """
        from flash_attn import flash_attn_func

        class Reader(nn.Module):
            def __init__(self, dim, num_heads):
                super().__init__()
                self.num_heads, self.qkv = num_heads, nn.Linear(dim, 3 * dim)

            def forward(self, x):
                b, t, _ = x.shape
                q, k, v = self.qkv(x).chunk(3, dim=-1)
                q, k, v = (one.reshape(b, t, self.num_heads, -1).transpose(1, 2) for one in (q, k, v))
                return flash_attn_func(q, k, v, causal=True)
        """,
        (".transpose(1, 2) for", " for"),
    ),
    "the first token alone as key": (
        "ATT407",
        """
        class Reader(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

            def forward(self, x, memory):
                first = memory[:, :1]
                return F.scaled_dot_product_attention(self.q(x), self.k(first), self.v(first))
        """,
        ("memory[:, :1]", "memory[:, 1:]"),
    ),
    "the mask of the target for the memory of nn.Transformer": (
        "ATT232",
        """
        class Translator(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.body = nn.Transformer(dim, 4, batch_first=True)

            def forward(self, a, b, a_pad, b_pad):
                future = self.body.generate_square_subsequent_mask(b.size(1))
                return self.body(
                    a, b, tgt_mask=future, src_key_padding_mask=a_pad, tgt_key_padding_mask=b_pad,
                    memory_key_padding_mask=b_pad,
                )
        """,
        ("memory_key_padding_mask=b_pad", "memory_key_padding_mask=a_pad"),
    ),
    "rotary positions that begin again with a cache": (
        "ATT512",
        """
        class Reader(nn.Module):
            def forward(self, x, past=None):
                b, t, _ = x.shape
                q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
                positions = torch.arange(t, device=x.device)
                q, k = apply_rotary_emb(q, positions), apply_rotary_emb(k, positions)
                if past is not None:
                    k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
                return F.scaled_dot_product_attention(q, k, v), (k, v)
        """,
        (
            "torch.arange(t, device=x.device)",
            "torch.arange(t, device=x.device) + (0 if past is None else past[0].size(2))",
        ),
    ),
    "no mask where there are many queries, by a guard": (
        "ATT214",
        """
        def attend(q, k, v):
            if q.size(-2) > 1:
                return F.scaled_dot_product_attention(q, k, v)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        """,
        ("> 1", "== 1"),
    ),
    "no scale, a product that adds a bias": (
        "ATT101",
        """
        def eager(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor) -> Tensor:
            logits = torch.baddbmm(attn_bias, query, key.mT)
            return torch.bmm(logits.softmax(2), value)
        """,
        ("query, key.mT)", "query, key.mT, alpha=key.shape[-1] ** -0.5)"),
    ),
    "no scale, heads by a lambda": (
        "ATT101",
        """
        class Reader(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.a, self.b, self.c = (nn.Linear(dim, dim) for _ in range(3))
                self.heads = heads

            def forward(self, x):
                cut = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                a, b, c = cut(self.a(x)), cut(self.b(x)), cut(self.c(x))
                mixed = torch.einsum("bhid,bhjd->bhij", a, b)
                return torch.einsum("bhij,bhjd->bhid", mixed.softmax(-1), c)
        """,
        ("a, b)\n", "a, b) / math.sqrt(a.shape[-1])\n"),
    ),
    "scaled twice, scores through a layer": (
        "ATT102",
        """
        class Mixed(nn.Module):
            def __init__(self, heads):
                super().__init__()
                self.mix = nn.Conv2d(heads, heads, 1)

            def forward(self, q, k, v):
                root = math.sqrt(q.shape[-1])
                q = q / root
                scores = torch.matmul(q, k.transpose(2, 3)) / root
                return self.mix(scores).softmax(-1) @ v
        """,
        ("q = q / root", "q = q.contiguous()"),
    ),
    "the number of heads": (
        "ATT104",
        """
        def attend(x, wq, wk, wv, num_heads, width):
            b, n, _ = x.size()
            q = (x @ wq).view(b, n, num_heads, width).permute(0, 2, 1, 3)
            k = (x @ wk).view(b, n, num_heads, width).permute(0, 2, 1, 3)
            v = (x @ wv).view(b, n, num_heads, width).permute(0, 2, 1, 3)
            s = q.matmul(k.transpose(2, 3)) * (1 / math.sqrt(num_heads))
            return s.softmax(3).matmul(v)
        """,
        ("math.sqrt(num_heads)", "math.sqrt(width)"),
    ),
    "pooled over the batch": (
        "ATT111",
        """
        class Pool(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.rate = nn.Linear(dim, 1)

            def forward(self, tokens):
                share = torch.softmax(self.rate(tokens).squeeze(-1), dim=0)
                return (tokens * share.unsqueeze(-1)).sum(dim=1)
        """,
        ("dim=0)", "dim=1)"),
    ),
    "one output at the end of a stack of layers": (
        "ATT113",
        """
        class Pool(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.rate = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1, bias=False))

            def forward(self, tokens):
                share = F.softmax(self.rate(tokens), dim=-1)
                return torch.sum(share * tokens, dim=1)
        """,
        ("dim=-1)", "dim=1)"),
    ),
    "pooled, then masked": (
        "ATT207",
        """
        def pool(x, rate, lengths):
            share = torch.softmax(x @ rate, dim=1)
            share = share * (torch.arange(x.size(1)) < lengths.unsqueeze(1))
            return torch.einsum("bn,bnd->bd", share, x)
        """,
        (
            "share = share * (torch.arange(x.size(1)) < lengths.unsqueeze(1))",
            "share = share.masked_fill(share.isnan(), 0)",
        ),
    ),
    "padding by lengths, in a conjunction": (
        "ATT208",
        """
        def attend(q, k, v, seq_lens):
            place = torch.arange(k.size(2), device=k.device)
            padding = place[None, :] >= seq_lens[:, None]
            before = place[:, None] >= place[None, :]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=before & padding[:, None, None])
        """,
        ("before & padding", "before & ~padding"),
    ),
    "a window by a lambda": (
        "ATT216",
        """
        from torch.nn.attention.flex_attention import create_block_mask

        def blocks(width, n):
            return create_block_mask(lambda b, h, q, k: q - k <= width, None, None, n, n)
        """,
        ("q - k <= width", "(q - k <= width) & (k <= q)"),
    ),
    "documents or causal, in a function of FlexAttention": (
        "ATT217",
        """
        from torch.nn.attention.flex_attention import create_block_mask

        def packed(segment_ids, n):
            def mask_mod(b, h, q_idx, kv_idx):
                same = segment_ids[b, q_idx] == segment_ids[b, kv_idx]
                return same | (kv_idx <= q_idx)

            return create_block_mask(mask_mod, segment_ids.size(0), None, n, n)
        """,
        ("same | (kv", "same & (kv"),
    ),
    "block means, the other way round": (
        "ATT218",
        """
        def coarse(q, k, v, size):
            b, h, n, d = k.shape
            kk = k.reshape(b, h, n // size, size, d).mean(dim=3)
            vv = v.reshape(b, h, n // size, size, d).mean(dim=3)
            block = torch.arange(n // size)
            scores = q @ kk.transpose(-2, -1) / math.sqrt(d)
            scores = scores.masked_fill(~(block[None, :] <= torch.arange(n)[:, None] // size), float("-inf"))
            return scores.softmax(-1) @ vv
        """,
        ("block[None, :] <= torch", "block[None, :] < torch"),
    ),
    "a pooling with a finite number": (
        "ATT221",
        """
        def pool(x, rate, there):
            scores = torch.where(there, x.matmul(rate), torch.tensor(-1e3))
            return (scores.softmax(1)[:, :, None] * x).sum(1)
        """,
        ("torch.tensor(-1e3)", 'torch.tensor(float("-inf"))'),
    ),
    "log-sum-exp by methods": (
        "ATT224",
        """
        def partial(q, k, v, visible):
            s = q @ k.mT / math.sqrt(q.size(-1)) if visible else torch.full((q.size(0), k.size(0)), -math.inf)
            total = s.logsumexp(-1, keepdim=True)
            return (s - total).exp() @ v, total
        """,
        ("(s - total).exp()", "(s - total.nan_to_num(neginf=0.0)).exp()"),
    ),
    "the padding of a source left to cross-attention": (
        "ATT232",
        """
        class Translate(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 8, batch_first=True), 2)
                self.dec = nn.TransformerDecoder(nn.TransformerDecoderLayer(d, 8, batch_first=True), 2)

            def forward(self, src, tgt, src_pad, causal):
                memory = self.enc(src, src_key_padding_mask=src_pad)
                return self.dec(tgt, memory, tgt_mask=causal)
        """,
        ("tgt_mask=causal", "tgt_mask=causal, memory_key_padding_mask=src_pad"),
    ),
    "a language model that computes its own loss": (
        "ATT233",
        """
        class Layer(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x):
                return x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=False)

        class Net(nn.Module):
            def __init__(self, n, d):
                super().__init__()
                self.tok, self.pos = nn.Embedding(n, d), nn.Embedding(512, d)
                self.layer = Layer(d)
                self.out = nn.Linear(d, n)

            def forward(self, ids):
                y = self.out(self.layer(self.tok(ids) + self.pos(torch.arange(ids.size(1)))))
                return F.cross_entropy(y[:, :-1].reshape(-1, y.size(-1)), ids[:, 1:].reshape(-1))
        """,
        ("is_causal=False", "is_causal=True"),
    ),
    "left padding by hand": (
        "ATT243",
        """
        class Scorer:
            def __call__(self, rows):
                width = max(map(len, rows))
                batch = torch.as_tensor([(width - len(row)) * [0] + row for row in rows])
                return self.model(batch).softmax(-1)
        """,
        ("self.model(batch)", "self.model(batch, attention_mask=batch != 0)"),
    ),
    "a mask that is made and left": (
        "ATT252",
        """
        class Local(nn.Module):
            def __init__(self, n):
                super().__init__()
                self.register_buffer("window_mask", torch.ones(n, n).tril().triu(-8), persistent=False)

            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v)
        """,
        ("(q, k, v)\n", "(q, k, v, attn_mask=self.window_mask.bool())\n"),
    ),
    "a projection in half precision": (
        "ATT311",
        """
        def attend(x, w, keep):
            q, k, v = (x @ w).to(torch.bfloat16).chunk(3, -1)
            s = torch.einsum("bid,bjd->bij", q, k) * q.shape[-1] ** -0.5
            return torch.einsum("bij,bjd->bid", s.masked_fill(~keep, -torch.inf).softmax(-1), v)
        """,
        (".softmax(-1)", ".float().softmax(-1).bfloat16()"),
    ),
    "folded heads become positions": (
        "ATT402",
        """
        def attend(q, k, v, b, h, n, d):
            q, k, v = (t.view(b, n, h, d).permute(0, 2, 1, 3).reshape(b * h, n, d) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v)
            return y.reshape(b, n, h * d)
        """,
        ("y.reshape(b, n, h * d)", "y.reshape(b, h, n, d).transpose(1, 2).reshape(b, n, h * d)"),
    ),
    "the mask has the batch first": (
        "ATT404",
        """
        class Tagger(nn.Module):
            def __init__(self, words, d):
                super().__init__()
                self.words, self.positions = nn.Embedding(words, d), nn.Parameter(torch.zeros(200, 1, d))
                self.read = nn.TransformerEncoderLayer(d, 4)

            def forward(self, ids):
                return self.read(self.words(ids), src_key_padding_mask=ids.eq(0))
        """,
        ("nn.TransformerEncoderLayer(d, 4)", "nn.TransformerEncoderLayer(d, 4, batch_first=True)"),
    ),
    "values among the rotated": (
        "ATT501",
        """
        def attend(self, q, k, v, angles):
            q, k, v = self.rotate(q, angles), self.rotate(k, angles), self.rotate(v, angles)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        """,
        ("self.rotate(v, angles)", "v.contiguous()"),
    ),
    "positions in the precision of an option": (
        "ATT503",
        """
        def rope_angles(length: int, inv_freq: Tensor, *, device=None, kind: torch.dtype = torch.half):
            return torch.arange(length, device=device, dtype=kind).outer(inv_freq)
        """,
        ("torch.half", "torch.float32"),
    ),
    "layers of one's own without positions": (
        "ATT504",
        """
        class Mix(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

            def forward(self, x):
                return x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

        class Sentence(nn.Module):
            def __init__(self, words, d):
                super().__init__()
                self.words = nn.Embedding(words, d)
                self.places = nn.Parameter(torch.randn(512, d))
                self.layers = nn.ModuleList([Mix(d) for _ in range(4)])

            def forward(self, ids):
                x = self.words(ids)
                for layer in self.layers:
                    x = layer(x)
                return x.mean(1)
        """,
        ("self.words(ids)\n", "self.words(ids) + self.places[: ids.size(1)]\n"),
    ),
    "angles from zero": (
        "ATT512",
        """
        class Rotated(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.qkv = nn.Linear(d, 3 * d)
                self.register_buffer("speeds", 10000.0 ** -torch.linspace(0, 1, d // 2))

            def forward(self, x, kv_cache):
                q, k, v = self.qkv(x)[:, None].chunk(3, -1)
                t = torch.arange(x.size(1), device=x.device)
                angles = torch.outer(t, self.speeds)
                q, k = turn(q, angles.cos(), angles.sin()), turn(k, angles.cos(), angles.sin())
                k, v = torch.cat((kv_cache.k, k), 2), torch.cat((kv_cache.v, v), 2)
                return F.scaled_dot_product_attention(q, k, v, is_causal=False)
        """,
        ("torch.outer(t, self.speeds)", "torch.outer(t + kv_cache.k.size(2), self.speeds)"),
    ),
    "an object with a buffer for the keys": (
        "ATT513",
        """
        class Slots:
            def __init__(self, shape):
                self.k, self.v, self.used = torch.zeros(shape), torch.zeros(shape), 0

            def put(self, k, v):
                upto = self.used + k.size(2)
                self.k[:, :, self.used : upto], self.v[:, :, self.used : upto] = k, v
                self.used = upto
                return self.k, self.v

        def step(q, k, v, slots: Slots):
            k, v = slots.put(k, v)
            return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
        """,
        ("return self.k, self.v", "return self.k[:, :, :upto], self.v[:, :, :upto]"),
    ),
    "relative positions left out": (
        "ATT514",
        """
        class Relative(nn.Module):
            def forward(self, q, k, v, cache=None):
                logits = q @ k.mT / math.sqrt(q.size(-1))
                if cache is None:
                    logits += self.rel_bias(q.size(2), k.size(2))
                return logits.softmax(-1) @ v
        """,
        ("if cache is None:", "if self.rel_bias is not None:"),
    ),
    "a ring of keys, cut first": (
        "ATT515",
        """
        class Local(nn.Module):
            def forward(self, q, k, v, prev_k, prev_v, keep):
                k, v = torch.concat([prev_k, k], 1), torch.concat([prev_v, v], 1)
                k, v = k[:, -self.size :], v[:, -self.size :]
                s = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
                return torch.bmm(s.masked_fill(~keep, -math.inf).softmax(2), v), k, v
        """,
        ("k, v = k[:, -self.size :], v[:, -self.size :]", "k, v = k.contiguous(), v.contiguous()"),
    ),
    "one query after the other": (
        "ATT601",
        """
        def attend(Q, K, V):
            out = []
            for query in Q:
                row = torch.tensor([torch.dot(query, key) / math.sqrt(len(query)) for key in K])
                out.append(torch.softmax(row, 0) @ V)
            return torch.stack(out)
        """,
        (
            """    out = []
    for query in Q:
        row = torch.tensor([torch.dot(query, key) / math.sqrt(len(query)) for key in K])
        out.append(torch.softmax(row, 0) @ V)
    return torch.stack(out)
""",
            "    return torch.softmax(Q @ K.T / math.sqrt(Q.size(1)), 1) @ V\n",
        ),
    ),
    "compiled under another name, and not called": (
        "ATT604",
        """
        from torch.nn.attention.flex_attention import flex_attention as flex

        fast = torch.compile(flex)

        def attend(q, k, v, blocks):
            return flex(q, k, v, block_mask=blocks)
        """,
        ("return flex(", "return fast("),
    ),
    "keys expanded by a helper": (
        "ATT607",
        """
        def widen(t, times):
            if times == 1:
                return t
            b, h, n, d = t.shape
            return t.unsqueeze(2).expand(b, h, times, n, d).reshape(b, h * times, n, d)

        def attend(q, k, v):
            times = q.size(1) // k.size(1)
            k, v = widen(k, times), widen(v, times)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        """,
        ("    k, v = widen(k, times), widen(v, times)\n", ""),
    ),
}


def mistakes(source: str) -> list[str]:
    return [one.code for one in diagnose(source, selection=MISTAKES)]


@pytest.mark.parametrize("name", CASES)
def test_the_mistake_is_found(name: str) -> None:
    code, source, _ = CASES[name]
    assert code in mistakes(IMPORTS + textwrap.dedent(source))


@pytest.mark.parametrize("name", CASES)
def test_the_correct_twin_has_no_such_mistake(name: str) -> None:
    code, source, (wrong, right) = CASES[name]
    source = textwrap.dedent(source)
    assert source.count(wrong) == 1
    assert code not in mistakes(IMPORTS + source.replace(wrong, right))


WIDER = {
    "tril minus tril": (
        "mask = torch.tril(ones) - torch.tril(ones, diagonal=-window_size - 1)",
        "mask = torch.tril(ones) - torch.tril(ones, diagonal=-window_size)",
    ),
    "a difference of indices": (
        "mask = (i[:, None] >= i) & (i[:, None] - i <= window_size)",
        "mask = (i[:, None] >= i) & (i[:, None] - i < window_size)",
    ),
}


@pytest.mark.parametrize("name", WIDER)
def test_a_window_of_one_key_more_is_a_hint(name):
    source = IMPORTS + textwrap.dedent("""
        def attend(q, k, v, window_size):
            i, ones = torch.arange(q.size(-2)), torch.ones(q.size(-2), k.size(-2))
            MASK
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            return torch.softmax(scores.masked_fill(mask == 0, -math.inf), dim=-1) @ v
    """)
    wrong, right = WIDER[name]
    (found,) = diagnose(source.replace("MASK", wrong), selection=RuleSelection(("ATT219",)))
    assert found.severity is Severity.HINT
    assert not diagnose(source.replace("MASK", right), selection=RuleSelection(("ATT219",)))


@pytest.mark.parametrize(
    "passed",
    [
        "causal=True, window_size=(window, 0)",
        "**{'causal': True, 'window_size': (window, window)}",
        "causal=True, softcap=0.0, window_size=(window, -1)",
    ],
)
def test_a_window_of_flash_attn_of_one_key_more_is_a_hint(passed):
    source = "from flash_attn import flash_attn_func\n\ndef attend(q, k, v, window):\n"
    source += f"    return flash_attn_func(q, k, v, {passed})\n"
    (found,) = diagnose(source, selection=RuleSelection(("ATT219",)))
    assert (found.line, found.severity) == (4, Severity.HINT)
    assert not diagnose(source.replace("(window,", "(window - 1,"), selection=RuleSelection(("ATT219",)))


@pytest.mark.parametrize("call", ["self.m(x, x, x)[1].numpy()", "torch.softmax(self.q(x) @ self.q(x).mT, -1).numpy()"])
def test_weights_with_a_gradient_as_an_array_are_a_hint(call):
    source = IMPORTS + textwrap.dedent(f"""
        class Reader(nn.Module):
            def __init__(self, d):
                super().__init__()
                self.m, self.q = nn.MultiheadAttention(d, 4), nn.Linear(d, d)

            def look(self, x):
                return {call}
    """)
    (found,) = diagnose(source, selection=RuleSelection(("ATT115",)))
    assert found.severity is Severity.HINT
    for right in (
        source.replace(".numpy()", ".detach().numpy()"),
        source.replace("    def look", "    @torch.no_grad()\n    def look"),
    ):
        assert not diagnose(right, selection=RuleSelection(("ATT115",)))
