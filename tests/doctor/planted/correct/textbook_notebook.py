# %% [markdown]
# # Attention, step by step

# %%
import math

import matplotlib
import torch
from torch import nn
from torch.nn import functional as F

matplotlib.use("Agg")
torch.manual_seed(1)

# %%
T, d = 6, 16
x = torch.randn(T, d)
Wq, Wk, Wv = (nn.Linear(d, d, bias=False) for _ in range(3))
q, k, v = Wq(x), Wk(x), Wv(x)

# %%
scores = q @ k.T / math.sqrt(d)
weights = F.softmax(scores, dim=-1)
context = weights @ v
print(weights.sum(-1))

# %% [markdown]
# The variance of a dot product grows with d.

# %%
for dim in (4, 64, 1024):
    a, b = torch.randn(1000, dim), torch.randn(1000, dim)
    raw = (a * b).sum(-1)
    print(dim, raw.std().item(), (raw / dim**0.5).std().item())

# %% [markdown]
# A mask.

# %%
future = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
masked = scores.masked_fill(future, float("-inf"))
causal_weights = torch.softmax(masked, dim=1)
print(causal_weights)

# %% [markdown]
# Many heads.


# %%
class MHA(nn.Module):
    def __init__(self, d_model, h, p=0.1):
        super().__init__()
        self.h, self.dk = h, d_model // h
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.drop = nn.Dropout(p)

    def forward(self, x, mask=None):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.h, self.dk).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = torch.matmul(q, k.transpose(2, 3)) * self.dk**-0.5
        if mask is not None:
            s = s.masked_fill(mask == 0, float("-inf"))
        a = self.drop(s.softmax(dim=3))
        return self.o(torch.matmul(a, v).transpose(1, 2).reshape(b, n, -1))


layer = MHA(d, 4).eval()
mask = torch.tril(torch.ones(T, T))
y = layer(x[None], mask)

# %% [markdown]
# And with what PyTorch has.

# %%
heads = lambda t: t.view(1, T, 4, 4).transpose(1, 2)  # noqa: E731
z = F.scaled_dot_product_attention(heads(layer.q(x)), heads(layer.k(x)), heads(layer.v(x)), is_causal=True)
assert torch.allclose(y, layer.o(z.transpose(1, 2).reshape(1, T, d)), atol=1e-5)
