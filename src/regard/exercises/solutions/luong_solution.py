"""Luong's decoder with the general score (Luong et al. 2015): scores, weights, context, and the attentional vector."""

import torch
from torch import Tensor


def attentional_vector(state: Tensor, annotations: Tensor, matrix: Tensor, combine: Tensor) -> Tensor:
    """s̃_t = tanh(W_c [c_t; s_t]) of each state, with e_tj = s_t · W h_j.

    Shapes: state s (..., M, H), annotations h (..., N, A), matrix W (H, A), combine W_c (H, A + H); returns
    (..., M, H).
    """
    scores = state @ matrix @ annotations.mT  # hole: the scores of all pairs, (..., M, N)
    weights = scores.softmax(dim=-1)  # hole: the weights, of which each row sums to 1
    context = weights @ annotations  # hole: the contexts, (..., M, A)
    both = torch.cat([context, state], dim=-1)  # hole: the context in front of the state, (..., M, A + H)
    return (both @ combine.mT).tanh()  # hole: the attentional vectors, (..., M, H)
