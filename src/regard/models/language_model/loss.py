"""The loss of training."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ...errors import ShapeError


def next_token_loss(logits: Tensor, tokens: Tensor, counted: Tensor | None = None) -> Tensor:
    """The mean of -log p(token t | tokens before t), over t = 1..length - 1: a number, in nats, float32 at least.

    Shapes: logits (batch, length, vocabulary), as the model gives them for these tokens (batch, length). `counted`
    (batch, length), bool, says which tokens are to be predicted: not padding, and of documents that are packed into
    one sequence not the first token of each. The first token of a sequence is predicted from nothing and never counts.

    Raises:
        ShapeError: shapes that do not fit; nothing is counted.

    >>> import torch
    >>> next_token_loss(torch.zeros(1, 3, 8), torch.tensor([[1, 2, 3]])).exp()
    tensor(8.)
    """
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape or (counted is not None and counted.shape != tokens.shape):
        mask = "" if counted is None else f" and counted {tuple(counted.shape)}"
        raise ShapeError(
            f"logits have the shape {tuple(logits.shape)}, tokens {tuple(tokens.shape)}{mask}; they need (batch, "
            "length, vocabulary) and (batch, length)"
        )
    predicted, targets = logits[:, :-1], tokens[:, 1:]
    if counted is not None:
        predicted, targets = predicted[counted[:, 1:]], targets[counted[:, 1:]]
    if not targets.numel():
        raise ShapeError("no token is counted: a loss needs sequences of two tokens or more, and some that count")
    wide = predicted if predicted.dtype.itemsize >= 4 else predicted.float()
    return functional.cross_entropy(wide.flatten(0, -2), targets.flatten())
