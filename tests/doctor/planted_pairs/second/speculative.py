import torch
from transformers import DynamicCache


@torch.no_grad()
def draft(model, ids, cache, count):
    tokens = []
    step = ids[:, cache.get_seq_length() :]
    for _ in range(count):
        logits = model(step, past_key_values=cache, use_cache=True).logits
        step = logits[:, -1:].argmax(-1)
        tokens.append(step)
    return torch.cat(tokens, dim=1)


@torch.no_grad()
def speculate(target, small, ids, new_tokens=64, lookahead=4):
    big_cache, small_cache = DynamicCache(), DynamicCache()
    end = ids.size(1) + new_tokens
    while ids.size(1) < end:
        guess = draft(small, ids, small_cache, lookahead)
        candidate = torch.cat([ids, guess], dim=1)
        feed = candidate[:, big_cache.get_seq_length() :]
        logits = target(feed, past_key_values=big_cache, use_cache=True).logits
        choice = logits[:, -lookahead - 1 :].argmax(-1)
        same = (choice[:, :-1] == guess).long().cumprod(dim=1)
        accepted = int(same.sum())
        ids = torch.cat([ids, guess[:, :accepted], choice[:, accepted : accepted + 1]], dim=1)
        small_cache.crop(ids.size(1) - 1)
    return ids
