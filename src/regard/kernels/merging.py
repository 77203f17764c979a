"""Parts of one softmax put together, as they come: the output and log-sum-exp of some rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..pairs import at_least_float32


class Merged:
    """lse = log(exp(lse₁) + exp(lse₂)), output = Σ exp(lseᵢ - lse) · outputᵢ, for one part after another.

    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), the online softmax.
    """

    def __init__(self) -> None:
        self._output: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, output: Tensor, lse: Tensor) -> None:
        """One more part, (..., m, Dv) and (..., m)."""
        if self._output is None or self._lse is None:
            self._output, self._lse = output, lse
            return
        total = torch.logaddexp(self._lse, lse)
        some = total.masked_fill(total == float("-inf"), 0.0)  # where no part has anything, all shares are 0
        shares = [torch.exp(part - some).unsqueeze(-1) for part in (self._lse, lse)]
        self._output = shares[0] * at_least_float32(self._output) + shares[1] * at_least_float32(output)
        self._lse = total

    def write(self, output: Tensor, lse: Tensor, arrange: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
        """What the parts add up to, arranged, into the tensors of a result; 0 and -inf where there were none."""
        if self._output is None or self._lse is None:
            output.zero_()
            lse.fill_(float("-inf"))
        else:
            output.copy_(arrange(self._output))
            lse.copy_(arrange(self._lse))
