"""Greedy generation with a cache: the prompt at once, then token by token."""

import torch


@torch.no_grad()
def reply(model, tokenizer, prompt, max_new_tokens=64):
    tokens = torch.tensor([tokenizer.encode(prompt)])
    cache = model.new_cache()
    start = 0
    step_input, written = tokens, []
    for _ in range(max_new_tokens):
        positions = torch.arange(start, start + step_input.size(1)).unsqueeze(0)
        logits = model(step_input, position_ids=positions, past_key_values=cache)
        chosen = logits[:, -1].argmax(dim=-1, keepdim=True)
        start += tokens.size(1)
        step_input = chosen
        written.append(chosen.item())
        if written[-1] == tokenizer.eos_id:
            break
    return tokenizer.decode(written)
