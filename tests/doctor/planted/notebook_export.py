# %% [markdown]
# # Attention from scratch
# Run the cells in order.

# %%
import numpy as np
import torch
import torch.nn.functional as F

torch.manual_seed(0)

# %%
sentence = "the cat sat on the mat because it was tired"
words = sentence.split()
vocab = {w: i for i, w in enumerate(sorted(set(words)))}
ids = torch.tensor([vocab[w] for w in words])
emb = torch.nn.Embedding(len(vocab), 16)
X = emb(ids).detach()
X.shape

# %%
W_q = torch.randn(16, 8) / 4
W_k = torch.randn(16, 8) / 4
W_v = torch.randn(16, 8) / 4

# %% [markdown]
# ## First version: one word after another

# %%
outputs = []
for i in range(len(X)):
    q_i = X[i] @ W_q
    scores = torch.stack([q_i @ (X[j] @ W_k) for j in range(len(X))]) / 8**0.5
    w = torch.softmax(scores, dim=0)
    outputs.append(sum(w[j] * (X[j] @ W_v) for j in range(len(X))))
out_loop = torch.stack(outputs)

# %% [markdown]
# ## Second version: matrices

# %%
Q, K, V = X @ W_q, X @ W_k, X @ W_v
S = Q @ K.T / np.sqrt(8)
A = F.softmax(S, dim=-1)
out = A @ V
A.sum(dim=-1)

# %% [markdown]
# ## Batches and heads

# %%
batch = torch.stack([X, X.flip(0), X.roll(1, 0)])
Qb, Kb, Vb = batch @ W_q, batch @ W_k, batch @ W_v
Ab = F.softmax(Qb @ Kb.transpose(1, 2) / np.sqrt(8), dim=1)
out_b = torch.bmm(Ab, Vb)

# %% [markdown]
# ## Causal

# %%
T = len(X)
mask = torch.tril(torch.ones(T, T))
S_masked = (Q @ K.T / np.sqrt(8)) * mask
A_causal = F.softmax(S_masked, dim=-1)
out_causal = A_causal @ V
A_causal[0]
