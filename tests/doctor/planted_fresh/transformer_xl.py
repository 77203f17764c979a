"""Attention with relative positions and a memory of the segment before."""

import torch
from torch import nn


class RelPartialLearnableAttn(nn.Module):
    def __init__(self, n_head=4, d_model=32, d_head=8):
        super().__init__()
        self.n_head, self.d_head = n_head, d_head
        self.qkv_net = nn.Linear(d_model, 3 * n_head * d_head, bias=False)
        self.r_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.scale = 1 / (d_head**0.5)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, d_head))
        self.r_r_bias = nn.Parameter(torch.randn(n_head, d_head))

    @staticmethod
    def _rel_shift(x):
        zero_pad = torch.zeros((x.size(0), 1, *x.size()[2:]), device=x.device, dtype=x.dtype)
        x_padded = torch.cat([zero_pad, x], dim=1)
        x_padded = x_padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])
        return x_padded[1:].view_as(x)

    def forward(self, w, r, attn_mask=None, mems=None):
        qlen, rlen, bsz = w.size(0), r.size(0), w.size(1)
        cat = w if mems is None else torch.cat([mems, w], 0)
        w_heads = self.qkv_net(cat)
        r_head_k = self.r_net(r).view(rlen, self.n_head, self.d_head)
        q, k, v = torch.chunk(w_heads, 3, dim=-1)
        q = q[-qlen:]
        klen = k.size(0)
        q = q.view(qlen, bsz, self.n_head, self.d_head)
        k = k.view(klen, bsz, self.n_head, self.d_head)
        v = v.view(klen, bsz, self.n_head, self.d_head)

        AC = torch.einsum("ibnd,jbnd->ijbn", q + self.r_w_bias, k)
        BD = torch.einsum("ibnd,jnd->ijbn", q + self.r_r_bias, r_head_k)
        attn_score = (AC + BD) * self.scale
        if attn_mask is not None:
            attn_score = attn_score.masked_fill(attn_mask[:, :, None, None], -float("inf"))
        attn_prob = torch.softmax(attn_score, dim=1)
        attn_vec = torch.einsum("ijbn,jbnd->ibnd", attn_prob, v)
        return self.layer_norm(w + self.o_net(attn_vec.reshape(qlen, bsz, -1)))


class MemTransformerLM(nn.Module):
    def __init__(self, n_token=60, n_layer=2, d_model=32):
        super().__init__()
        self.word_emb = nn.Embedding(n_token, d_model)
        self.layers = nn.ModuleList([RelPartialLearnableAttn(d_model=d_model) for _ in range(n_layer)])
        self.out = nn.Linear(d_model, n_token)
        self.d_model = d_model

    def positions(self, klen):
        pos_seq = torch.arange(klen - 1, -1, -1.0)
        inv_freq = 1 / (10000 ** (torch.arange(0.0, self.d_model, 2.0) / self.d_model))
        sinusoid = torch.outer(pos_seq, inv_freq)
        return torch.cat([sinusoid.sin(), sinusoid.cos()], dim=-1)

    def forward(self, tokens, mems=None):
        word_emb = self.word_emb(tokens.t())
        qlen = word_emb.size(0)
        mlen = mems[0].size(0) if mems is not None else 0
        klen = mlen + qlen
        dec_attn_mask = torch.triu(word_emb.new_ones(qlen, klen), diagonal=1).bool()
        pos_emb = self.positions(klen).to(word_emb)
        hids, core = [], word_emb
        for i, layer in enumerate(self.layers):
            mem = None if mems is None else mems[i]
            hids.append(core if mem is None else torch.cat([mem, core]))
            core = layer(core, pos_emb, attn_mask=dec_attn_mask, mems=mem)
        return self.out(core.transpose(0, 1)), [h.detach() for h in hids]
