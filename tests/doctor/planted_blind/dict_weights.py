"""A transformer written as pure functions over a dictionary of weights, as in a port from another framework."""

import torch


def layer_norm(x, weights):
    return torch.layer_norm(x, x.shape[-1:], weights["g"], weights["b"])


def split(x, n_head):
    *start, width = x.shape
    return x.reshape(*start, n_head, width // n_head)


def mha(x, weights, n_head):
    qkv = x @ weights["c_attn"]
    queries, keys, values = (split(one, n_head) for one in qkv.chunk(3, dim=-1))
    logits = torch.einsum("blhd,bmhd->bhlm", queries, keys)
    keep = torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1])
    logits = torch.where(keep, logits, -torch.inf)
    out = torch.einsum("bhlm,bmhd->blhd", torch.softmax(logits, dim=-1), values)
    return out.flatten(2) @ weights["c_proj"]


def mha_queries_last(x, weights, n_head):
    queries, keys, values = (split(x @ weights[name], n_head) for name in ("q", "k", "v"))
    logits = torch.einsum("bqhd,bkhd->bqkh", queries, keys) * queries.shape[-1] ** -0.5
    probs = logits.softmax(-1)
    return torch.einsum("bqkh,bkhd->bqhd", probs, values).flatten(2) @ weights["o"]


def mha_masked(x, keep, weights, n_head):
    queries, keys, values = (split(x @ weights[name], n_head).transpose(1, 2) for name in ("q", "k", "v"))
    logits = queries @ keys.mT / queries.shape[1] ** 0.5
    logits = logits.masked_fill(~keep[:, None, None], -torch.inf)
    return (logits.softmax(-1) @ values).transpose(1, 2).flatten(2) @ weights["o"]


def block(x, weights, n_head):
    x = x + mha(layer_norm(x, weights["ln_1"]), weights["attn"], n_head)
    hidden = torch.nn.functional.gelu(layer_norm(x, weights["ln_2"]) @ weights["up"])
    return x + hidden @ weights["down"]
