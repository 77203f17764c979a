import torch
from transformers import GPT2LMHeadModel, GPT2TokenizerFast


@torch.inference_mode()
def greedy(prompts, name="gpt2", max_new_tokens=40, device="cpu"):
    tokenizer = GPT2TokenizerFast.from_pretrained(name)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    model = GPT2LMHeadModel.from_pretrained(name).to(device).eval()

    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    past = None
    step = ids
    for _ in range(max_new_tokens):
        out = model(
            input_ids=step,
            attention_mask=mask,
            past_key_values=past,
            use_cache=True,
        )
        past = out.past_key_values
        step = out.logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, step], dim=-1)
        mask = torch.cat([mask, mask.new_ones(mask.size(0), 1)], dim=-1)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)
