"""The formula as it is written: any score, mask, bias, dtype and derivative. The oracle of every other kernel."""

from __future__ import annotations

from ..pairs import AdditivePairs
from ..problem import Problem
from ..transforms import without_autocast
from .base import Cost, Result
from .counting import CAP, DROP, FEATURE, MASK, SELECT, VALUE, WEIGHTS, read
from .formula import formula
from .shield import shielded
from .tiling import distinct


class Reference:
    """C = softmax( f(Q, K) + B, where M ) · V, with all the weights in memory at once.

    Sums are in float32 at least; autocast does not reach in.
    """

    name = "reference"

    def why_not(self, problem: Problem) -> list[str]:
        """Nothing: whatever is a problem, this computes."""
        return []

    def cost(self, problem: Problem) -> Cost:
        """Every pair is computed and kept, several times over: scores, masked scores, weights."""
        pairs, features = problem.weights_shape.numel(), problem.pairs.query.shape[-1]
        size = max(problem.value.element_size(), 4)
        masks, biases = distinct(problem)
        additive = isinstance(problem.pairs, AdditivePairs)
        steps = (masks > 0) + (biases > 0) + 3 * (problem.softcap is not None) + 3 * (problem.dropout is not None)
        one = problem.queries * problem.keys
        return Cost(
            flops=2.0 * pairs * (problem.value.shape[-1] + features * (not additive)),
            bytes=size * pairs * (3.0 + steps / 2 + 2.0 * features * additive),
            passes=pairs * (WEIGHTS + FEATURE * features * additive)
            + pairs
            * (SELECT * bool(masks) + CAP * (problem.softcap is not None) + DROP * (problem.dropout is not None))
            + one * (MASK * masks + VALUE * biases),
            moved=read(problem),
            calls=30.0 + 20.0 * bool(masks) + 10.0 * steps,
            note="it computes all pairs, and keeps them in memory",
        )

    def run(self, problem: Problem) -> Result:
        """The output, and the log-sum-exp where it is wanted."""
        with without_autocast(problem.value.device.type):
            return shielded(problem, formula)
