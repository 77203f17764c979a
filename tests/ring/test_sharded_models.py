"""Layers and models over a sequence that is cut over processes: the loss and the gradients of one process."""

import numpy as np
import pytest
import torch
from ring_jobs import LAYERS, MODELS, atlas_parts, make_layer, small_input, small_layer

import regard
import regard.ring as ring
from regard import explorer, lenses, masks


@pytest.mark.parametrize(
    ("kind", "processes", "layout", "head_parallel", "again"),
    [
        ("softmax", 3, ring.Zigzag(), 1, False),
        ("softmax", 2, ring.Contiguous((20, 31)), 2, False),
        ("softmax", 4, ring.Striped(), 2, True),
        ("mixed", 3, ring.Zigzag(), 1, False),
        ("mixed", 5, ring.Contiguous(), 1, False),
        ("mixed", 2, ring.Contiguous((20, 31)), 2, False),
        ("mixed", 3, ring.Contiguous(), 1, True),
    ],
)
def test_a_language_model_has_the_gradients_of_one_process(pool, kind, processes, layout, head_parallel, again):
    """again: activations are computed a second time in the backward pass, which messages are part of."""
    length = 51
    sharding = {"layout": layout, "head_parallel": head_parallel, "again": again}
    answers = pool.run("model_gradients", processes, model=kind, length=length, **sharding)
    model = MODELS[kind]().double()
    text = torch.randint(23, (2, length + 1), generator=torch.Generator().manual_seed(0))
    logits = model(text[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
    (loss / text.numel()).backward()
    truth = {"loss": loss.detach() / text.numel(), **{name: p.grad for name, p in model.named_parameters()}}
    for name, found in answers[0].items():
        needs = truth[name].numpy()
        assert np.linalg.norm(found - needs) <= 2e-6 * np.linalg.norm(needs) + 1e-8, name


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mask", ["none", "padding", "documents"])
def test_layers_of_linear_attention(pool, kind, mask):
    layout = ring.Zigzag() if kind == "causal" else ring.Striped()
    found = pool.run("layer", 3, kind=kind, mask=mask, layout=layout)[0]
    layer, x, made = make_layer(kind, mask)
    output = layer(x, mask=made)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    np.testing.assert_allclose(found["output"], output.detach().numpy(), atol=2e-6)
    np.testing.assert_allclose(found["gradient"], gradient.numpy(), atol=2e-5)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("positions", r"the queries of rank 0 are given at the positions 0\.\.3, but Zigzag\(\) gives it 0\.\.7: pass"),
        (
            "batch",
            r"the query positions have the shape \(1, 4\); in a ring all sequences of a batch",
        ),
        ("alignment", r"Alignment follows a path through the weights of all rows"),
        ("hook", r"the processes of the ring disagree on attention hook: rank . has"),
        (
            "striped",
            r"passes a state from each range .* Striped\(\) gives process 0 the positions 0, 2, \.\.\.: cut the",
        ),
        (
            "convolution",
            r"a convolution or a token shift in ring.sharded would read zeros in place of the tokens",
        ),
        ("linformer", r"Linformer in ring.sharded would mix the keys of this process alone"),
        ("lenses", r"lenses read weights of at least 0 that sum to 1 in each row, and normalize=False has others"),
    ],
)
def test_what_is_refused_in_a_block(pool, how, message):
    for answer in pool.run("misplaced", 2, how=how):
        with pytest.raises(ValueError, match=message):
            raise ValueError(answer)


@pytest.mark.parametrize(("processes", "layout"), [(2, ring.Zigzag()), (3, ring.Striped())])
def test_a_layer_observed_in_a_block_has_the_lenses_of_one_process(pool, processes, layout):
    length, x = 40, small_input(40).requires_grad_()
    entropy, received, weights = lenses.Entropy(), lenses.Received(), lenses.Weights()
    seen = small_layer().observe(x, entropy, received, weights)
    (gradient,) = torch.autograd.grad(seen.output.square().sum(), x)
    query = x.detach().view(1, -1, 4, 8).transpose(1, 2)
    output, lse = regard.attention_with_lse(query, query, query, mask=masks.causal())
    truth = {"output": seen.output, "gradient": gradient, "entropy": seen[entropy], "weights": seen[weights]}
    truth |= {"with lse": output, "lse": lse, "received": seen[received]}
    for answer in pool.run("layer_observation", processes, length=length, layout=layout):
        assert answer.keys() == truth.keys()
        for name, needs in truth.items():
            np.testing.assert_allclose(answer[name], needs.detach().numpy(), rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "processes", "layout", "head_parallel", "order"),
    [
        ("softmax", 4, ring.Striped(), 2, "inside"),
        ("recorded", 1, ring.Contiguous(), 1, "inside"),
        ("recorded", 2, ring.Zigzag(), 1, "inside"),
        ("recorded", 3, ring.Contiguous((20, 1, 30)), 1, "around"),
        ("recorded", 4, ring.Contiguous(), 2, "inside"),
    ],
)
def test_the_atlas_of_a_sharded_model_is_that_of_one_process(pool, kind, processes, layout, head_parallel, order):
    """Rank 0 has it. Records are the same, arrays to rounding: q and k in float16 to a unit in the last place.

    What goes into the second layer is the first one's attention, merged over processes, which rounds differently.
    """
    length, model = 51, MODELS[kind]()
    arguments = {"model": kind, "length": length, "layout": layout, "head_parallel": head_parallel, "order": order}
    answers = pool.run("record", processes, **arguments)
    tokens = torch.randint(23, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), explorer.record(model) as recording:
        model(tokens)
    needs, found = atlas_parts(recording.atlas(tokens=[str(n % 7) for n in range(length)])), answers[0]
    for rank, answer in enumerate(answers[1:], 1):
        assert answer.startswith("AtlasError: no attention was caught in this process"), rank
        assert "in ring.sharded the process of rank 0 records the whole sequence" in answer
    assert len(found["records"]) == len(needs["records"]) == len(model.blocks)
    for has, wants in zip(found["records"], needs["records"], strict=True):
        assert has.keys() == wants.keys()
        for field, value in wants.items():
            if field == "rounding":
                assert has[field] == pytest.approx(value, rel=1e-3)
            elif field != "roles":
                assert has[field] == value, field
    assert found["arrays"].keys() == needs["arrays"].keys()
    for name, wants in needs["arrays"].items():
        has = found["arrays"][name]
        assert has.dtype == wants.dtype
        assert has.shape == wants.shape
        if wants.dtype == np.float16:  # queries and keys
            np.testing.assert_allclose(has, wants, rtol=2**-10, atol=2e-6, err_msg=name)
            assert (has != wants).mean() < 0.02, name
        elif wants.dtype == np.float32:
            size = np.abs(wants[np.isfinite(wants)]).max(initial=1.0)
            np.testing.assert_allclose(has, wants, rtol=0, atol=1e-4 * size, err_msg=name)
        else:  # cells of maps in one byte, words
            np.testing.assert_allclose(has.astype(int), wants.astype(int), atol=name.split(".")[1] in ("max", "mean"))


@pytest.mark.slow  # the first optimiser of a process imports for seconds
def test_the_demonstration_has_the_losses_of_one_process(pool):
    losses = pool.run("demo", length=500, steps=3)[0]
    assert losses[-1][0] < losses[0][0]
    for ours, theirs in losses:
        assert abs(ours - theirs) < 1e-5
