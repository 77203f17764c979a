"""Layers and models over a sequence that is cut over processes: the loss and the gradients of one process."""

import numpy as np
import pytest
import torch
from ring_jobs import small_model

import regard.ring as ring


@pytest.mark.parametrize(
    ("processes", "layout", "head_parallel"),
    [(3, ring.Zigzag(), 1), (2, ring.Contiguous((20, 31)), 2), (4, ring.Striped(), 2)],
)
def test_a_language_model_has_the_gradients_of_one_process(pool, processes, layout, head_parallel):
    length = 51
    answers = pool.run("model_gradients", processes, length=length, layout=layout, head_parallel=head_parallel)
    model = small_model().double()
    text = torch.randint(23, (2, length + 1), generator=torch.Generator().manual_seed(0))
    logits = model(text[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
    (loss / text.numel()).backward()
    truth = {"loss": loss.detach() / text.numel(), **{name: p.grad for name, p in model.named_parameters()}}
    for name, found in answers[0].items():
        needs = truth[name].numpy()
        assert np.linalg.norm(found - needs) <= 2e-6 * np.linalg.norm(needs) + 1e-8, name


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("positions", r"the queries of rank 0 are given at the positions 0\.\.3, but Zigzag\(\) gives it 0\.\.7: pass"),
        (
            "batch",
            r"the query positions have the shape \(1, 4\); in a ring all sequences of a batch",
        ),
        ("linear", r"linear attention in ring.sharded would read this process's tokens alone"),
        ("lse", r"the log-sum-exp of an attention in ring.sharded is wanted"),
    ],
)
def test_what_is_refused_in_a_block(pool, how, message):
    for answer in pool.run("misplaced", 2, how=how):
        with pytest.raises(ValueError, match=message):
            raise ValueError(answer)


@pytest.mark.slow  # the first optimiser of a process imports for seconds
def test_the_demonstration_has_the_losses_of_one_process(pool):
    losses = pool.run("demo", length=500, steps=3)[0]
    assert losses[-1][0] < losses[0][0]
    for ours, theirs in losses:
        assert abs(ours - theirs) < 1e-5
