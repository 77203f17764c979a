"""Training on preferences: an answer that was chosen and one that was rejected, in one row."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        q, k, v = self.in_proj(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out_proj(y.transpose(1, 2).flatten(2))


class Policy(nn.Module):
    def __init__(self, vocab=80, dim=32, heads=4, layers=2, size=128):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, dim), nn.Embedding(size, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def concatenated(chosen, rejected):
    """Both answers of each pair in one row; the positions of the second start again."""
    input_ids = torch.stack([torch.cat(pair) for pair in zip(chosen, rejected)])
    position_ids = torch.cat([torch.arange(len(chosen[0])), torch.arange(len(rejected[0]))])
    return {"input_ids": input_ids, "position_ids": position_ids.expand(len(input_ids), -1)}


def dpo_loss(policy, reference, chosen, rejected, beta=0.1):
    batch = concatenated(chosen, rejected)
    border = len(chosen[0])
    ratios = []
    for model in (policy, reference):
        with torch.set_grad_enabled(model is policy):
            logits = model(**batch)
            picked = logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
            ratios.append(picked[:, : border - 1].sum(1) - picked[:, border:].sum(1))
    return -F.logsigmoid(beta * (ratios[0] - ratios[1])).mean()


@torch.inference_mode()
def sample(policy, prompt, count, temperature=1.0):
    policy.eval()
    ids = prompt
    while ids.size(1) < prompt.size(1) + count:
        logits = policy(ids)[:, -1] / temperature
        nxt = torch.distributions.Categorical(logits=logits).sample()
        ids = torch.hstack([ids, nxt[:, None]])
    return ids
