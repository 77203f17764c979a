"""Decoding over keys that are cut over processes: the output of one process in all of them."""

import random

import numpy as np
import pytest
import torch
from ring_cases import RingCase


@pytest.mark.parametrize("processes", [1, 3, 5])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": "causal", "sinks": True, "heads": 4},
        {"mask": "sinks and window", "bias": "alibi"},
        {"mask": "padding", "bias": "relative", "batch": (2,), "softcap": 2.0},
    ],
    ids=lambda options: options["mask"],
)
def test_decoding_is_that_of_one_process(pool, processes, queries, options):
    case = RingCase(11, 90, **options)
    owner = random.Random(0).choices(range(max(processes - 1, 1)), k=90)  # of several, the last has no key
    answers = pool.run("decode", processes, case=case, queries=queries, owner=owner)
    truth = case.expected(torch.float64)["output"][..., -queries:, :].numpy()
    for found in answers:
        assert np.linalg.norm(found - truth) <= 1e-6 * np.linalg.norm(truth)
        assert (found == answers[0]).all()


def test_queries_that_differ_are_refused(pool):
    answers = pool.run("decode", 3, case=RingCase(11, 30), queries=1, owner=[0] * 10 + [1] * 10 + [2] * 10, seed=1)
    assert all(
        answer.startswith("RingError: the processes of the ring disagree on query: rank 1") for answer in answers
    )
