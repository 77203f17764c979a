"""One head order and one word alignment: `explorer/test/heads.json` holds the page to the results of Python.

The file has inputs and what `regard.heads` returns for them; `explorer/test/heads.unit.ts` reads the same file. It is
written by `python tests/heads/test_page_cases.py`.
"""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from regard import heads
from regard.heads.word_alignment import alignment_error_rate, mutual_links, word_links, word_weights

FILE = Path(__file__).parents[2] / "explorer" / "test" / "heads.json"
THRESHOLD = 0.25


def rounded(values: torch.Tensor) -> list:
    """Nested lists of numbers with 6 decimals, as the page compares them."""
    return torch.round(values.double(), decimals=6).tolist()


def distance_matrices() -> list[list[list[float]]]:
    """Symmetric matrices of multiples of 1/64, which float32 represents exactly: several have ties."""
    numbers = random.Random(0)
    matrices = [[], [[0.0]], [[0.0 if a == b else 1.0 for b in range(5)] for a in range(5)]]
    line = [0.0, 5.0, 2.0, 9.0, 1.0]
    matrices.append([[abs(a - b) for b in line] for a in line])
    for count, most in ((2, 64), (3, 64), (6, 3), (9, 8), (17, 4096), (30, 16)):
        matrix = [[0.0] * count for _ in range(count)]
        for a in range(count):
            for b in range(a):
                matrix[a][b] = matrix[b][a] = numbers.randint(1, most) / 64
        matrices.append(matrix)
    return matrices


def order_cases() -> list[dict]:
    return [
        {"divergence": matrix, "order": heads.similarity_order(torch.tensor(matrix).reshape(len(matrix), len(matrix)))}
        for matrix in distance_matrices()
    ]


def rows_of_weights(numbers: random.Random, keys: int, total: float) -> list[float]:
    shares = [numbers.choice([0.0, 0.0, numbers.random(), 4 * numbers.random()]) for _ in range(keys)]
    shares[numbers.randrange(keys)] += 1.0
    return [round(total * share / sum(shares), 6) for share in shares]


def divergence_cases() -> list[dict]:
    """Rows that sum to 1; rows with a sink, which sum to less; rows that attend to nothing."""
    numbers = random.Random(1)
    totals = [1.0], [1.0, 0.75, 0.25], [1.0, 0.5, 0.0]
    weights = [
        [[rows_of_weights(numbers, keys, numbers.choice(total)) for _ in range(queries)] for _ in range(count)]
        for total, (count, queries, keys) in zip(totals, [(6, 5, 5), (5, 4, 7), (5, 6, 3)], strict=True)
    ]
    cases = []
    for one in weights:
        divergence = heads.head_divergence(torch.tensor(one))
        order = heads.similarity_order(divergence)
        cases.append({"weights": one, "divergence": rounded(divergence), "order": order})
    return cases


def word_cases() -> list[dict]:
    """Weights [target tokens, source tokens], with ties; null is a masked pair, which Python has as 0."""
    masked = None
    cases = [
        (
            [[0.5, 0.25, 0.125, 0.125], [0.125, 0.25, 0.5, 0.125], [0.0, 0.375, 0.125, 0.5]],
            [0, 0, 1],
            [0, 1, 1, None],
        ),
        ([[0.9, 0.1, 0.0, 0.0], [0.5, 0.4, 0.1, 0.0], [0.1, 0.2, 0.7, 0.0], [0.0, 0.0, 0.1, 0.05]], None, None),
        ([[0.9, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.3, 0.0, 0.0, 0.2]], None, None),
        ([[0.0, 0.5, 0.5]], None, None),
        ([[masked, masked]], None, None),
        ([[1.0, masked], [0.5, 0.5]], [0, 2], [0, 1]),
        ([[0.0, 0.0], [masked, 1.0]], None, None),
    ]
    numbers = random.Random(2)
    for targets, sources in ((3, 3), (5, 4), (4, 7), (9, 8), (12, 12)):
        weights = [[numbers.choice([0, 0, 1, 2, 3, 5, 8]) / 32 for _ in range(sources)] for _ in range(targets)]
        words = [sorted(numbers.randrange(-(-2 * n // 3)) for _ in range(n)) for n in (targets, sources)]
        cases += [(weights, None, None), (weights, *words)]
    return [word_case(*case) for case in cases]


def word_case(weights: list, target_words: list | None, source_words: list | None) -> dict:
    target_words = list(range(len(weights))) if target_words is None else target_words
    source_words = list(range(len(weights[0]))) if source_words is None else source_words
    numbers = torch.tensor([[weight or 0.0 for weight in row] for row in weights])
    sides = [[-1 if word is None else word for word in words] for words in (source_words, target_words)]
    return {
        "weights": weights,
        "source_words": sides[0],
        "target_words": sides[1],
        "between": rounded(word_weights(numbers, sides[1], sides[0])),
        "argmax": word_links(numbers, *sides),
        "threshold": word_links(numbers, *sides, threshold=THRESHOLD),
        "mutual": mutual_links(numbers, *sides),
        "grow-diag": mutual_links(numbers, *sides, grow=True),
    }


def error_rate_cases() -> list[dict]:
    numbers = random.Random(3)
    pairs = [(source, target) for source in range(4) for target in range(4)]
    cases = [
        ([(0, 0)], [(0, 0)], [(1, 1)]),
        ([(0, 1)], [(0, 0)], []),
        ([], [(0, 0)], []),
        ([(0, 0), (1, 1)], [], [(1, 1)]),
    ]
    cases += [tuple(sorted(numbers.sample(pairs, numbers.randint(1, 8))) for _ in range(3)) for _ in range(8)]
    return [
        {
            "links": links,
            "sure": sure,
            "possible": possible,
            "error_rate": round(alignment_error_rate([links], [sure], [possible]), 9),
        }
        for links, sure, possible in cases
    ]


def table() -> dict:
    return {
        "orders": order_cases(),
        "divergences": divergence_cases(),
        "words": word_cases(),
        "threshold": THRESHOLD,
        "error_rates": error_rate_cases(),
    }


def same(one: object, other: object) -> bool:
    """Whether two JSON values agree; numbers may differ in the last of the decimals that are written."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, abs_tol=2e-6)
    return one == other


@pytest.mark.parametrize("name", ["orders", "divergences", "words", "threshold", "error_rates"])
def test_the_table_of_the_page_is_up_to_date(name):
    written = json.loads(FILE.read_text(encoding="utf-8"))
    computed = json.loads(json.dumps(table()))
    assert written.keys() == computed.keys()
    assert same(written[name], computed[name]), f"{FILE.name} is not what Python computes: run this file to write it"


if __name__ == "__main__":
    lines = (f'"{name}": {json.dumps(value)}' for name, value in table().items())
    FILE.write_text("{\n" + ",\n".join(lines).replace("}, {", "},\n  {") + "\n}\n", encoding="utf-8")
