"""What travels in a ring, which calls are refused, and what becomes of one that loses a process."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Pool
from ring_cases import RingCase

import regard
import regard.ring as ring
from regard import biases, masks
from regard.errors import ConfigurationError


def bytes_of(keys: int, case: RingCase) -> int:
    return keys * case.key_heads * (8 + 6) * 4


@pytest.mark.parametrize("backward", [False, True])
def test_no_more_is_sent_than_the_mask_needs(pool, backward):
    case = RingCase(1, 2048, mask="causal window", reach=255)
    answers = pool.run("traffic", 4, case=case, backward=backward)
    needed = bytes_of(255, case)  # of one neighbour; backward keys travel again, and gradients travel home
    for rank, (sent, peers) in enumerate(answers):
        ahead, behind = rank < 3, rank > 0
        most = 1.3 * needed * ((2 * ahead + behind) if backward else ahead)
        assert bool(sent) == bool(most)
        assert sent <= most
        assert peers == sorted([rank + 1] * ahead + [rank - 1] * (behind and backward))


def test_all_keys_travel_to_all_others_without_a_mask(pool):
    case = RingCase(1, 60, mask="none")
    for sent, peers in pool.run("traffic", 3, case=case, backward=False):
        assert sent == 2 * bytes_of(20, case)
        assert len(peers) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": None}, r"disagree on mask: rank 1 has None , rank 0 has causal\(\)"),
        ({"mask": masks.window(before=3)}, r"disagree on mask: rank 1 has window\(before=3\)"),
        ({"mask": masks.documents([0] * 12 + [1] * 12)}, r"disagree on mask: rank 1 has documents\("),
        ({"layout": ring.Zigzag()}, r"disagree on layout: rank 1 has Zigzag\(\), rank 0 has Contiguous\("),
        ({"dtype": "float64"}, r"disagree on dtype: rank 1 has float64, rank 0 has float32"),
        ({"shape": (1, 4, 8, 8)}, r"disagree on query shape: rank 1 has \(1, 4, ·, 8\), rank 0 has \(1, 2, ·, 8\)"),
        ({"requires_grad": True}, r"disagree on requires_grad: rank 1 has "),
        ({"softcap": 3.0}, r"disagree on softcap: rank 1 has 3.0, rank 0 has None"),
        ({"dropout_p": 0.5}, r"disagree on dropout_p: rank 1 has 0.5, rank 0 has 0"),
        ({"kernel": "tiled"}, r"disagree on kernel: rank 1 has 'tiled', rank 0 has None"),
        ({"shape": (1, 2, 9, 8)}, r"rank 0 has 8 keys, but Contiguous\(lengths=None\) gives it 9 of 25 positions"),
    ],
)
def test_processes_that_disagree(pool, change, message):
    answers = pool.run("differing", 3, rank=1, change=change)
    assert len(set(answers)) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(answers[0])


def test_equal_documents_of_other_contents_differ(pool):
    alike = {"mask": masks.documents([0] * 12 + [1] * 12)}
    answers = pool.run("differing", 3, rank=5, change=alike)
    assert answers == ["computed"] * 3


def test_a_wrong_argument_of_one_process_is_told_to_all(pool):
    answers = pool.run("differing", 3, rank=2, change={"scale": float("nan")})
    assert answers[2].startswith("ConfigurationError: scale is nan")
    for answer in answers[:2]:
        assert answer.startswith("RingError: rank 2 of the ring has wrong arguments: scale is nan")


def test_after_an_error_the_group_goes_on(pool):
    pool.run("differing", 3, rank=1, change={"mask": None})
    assert pool.run("differing", 3, rank=5, change={}) == ["computed"] * 3


CONSTANTS = (
    (
        "regard.ring.key_exchange",
        "MOST_PARTS",
        r"parts of a hop: rank 2 has at most 17, of at least 524288 bytes, rank 0 ",
    ),
    (
        "regard.ring.key_exchange",
        "PART_BYTES",
        r"parts of a hop: rank 2 has at most 16, of at least 524289 bytes, rank 0 ",
    ),
    ("regard.ring.hops", "KEY_TILE", r"tiles of a hop: rank 2 has 65 keys in at most 4 spans, at most 128 of queries"),
    ("regard.ring.hops", "MAX_SPANS", r"tiles of a hop: rank 2 has 64 keys in at most 5 spans, at most 128 of queries"),
    ("regard.ring.handshake", "MESSAGES", r"version of messages: rank 2 has 2, rank 0 has 1"),
)


@pytest.mark.parametrize(("module", "name", "message"), CONSTANTS)
def test_processes_that_would_cut_messages_differently(pool, module, name, message):
    for answer in pool.run("differing_constant", 3, rank=2, module=module, name=name):
        assert re.match(f"RingError: the processes of the ring disagree on {message}", answer)
    assert pool.run("differing_constant", 3, rank=-1, module=module, name=name) == ["computed"] * 3


@pytest.mark.parametrize(
    ("shapes", "arguments", "message"),
    [
        ([(2, 3), (1, 3)], {}, "computed"),
        ([(2, 3), (1, 4)], {}, r"disagree on shape: rank 1 has \(·, 4\), rank 0 has \(·, 3\); all need the same"),
        ([(2, 3), (1, 3)], {"dtype": torch.float64}, r"disagree on dtype: rank 1 has float64, rank 0 has float32"),
        ([(2, 3), (1, 3)], {"requires_grad": True}, r"disagree on requires_grad: rank 1 has True, rank 0 has False"),
        ([(1, 3), (2, 3)], {}, r"rank 0 has 1 positions along dim 0, but Contiguous.* gives it 2 of 3: unshard with"),
        ([(2, 3), (1, 3)], {"dim": 2}, r"dim is 2, but the tensor has 2 axes, \(2, 3\)|\(1, 3\)"),
    ],
)
def test_shards_that_cannot_be_gathered(pool, shapes, arguments, message):
    for answer in pool.run("differing_unshard", 2, shapes=shapes, **arguments):
        with pytest.raises(ValueError, match=message):
            raise ValueError(answer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [1, 0, 1]}, r"2 tokens cannot be cut for 3 processes"),
        ({"lengths": [4, 2, 3]}, r"rank 0 has 4 keys, .* gives it 3 of 9 .*\(4, 2, 3\), as Contiguous\(lengths\)"),
        ({"lengths": [3, 3, 3], "key_lengths": [2, 2, 2]}, r"the ring has 9 queries and 6 keys"),
        ({"lengths": [3, 3, 3], "layout": "zigzag"}, r"layout is 'zigzag'; it needs a layout"),
        ({"lengths": [3, 3, 3], "kernel": "sdpo"}, r"there is no kernel 'sdpo'; did you mean 'sdpa'"),
        (
            {"lengths": [3, 3, 3], "mask": masks.where(keep=torch.ones(3, 3, dtype=torch.bool))},
            r"mask where\(keep=<bool \(3, 3\)>\) has a tensor over pairs, which has no global positions",
        ),
        ({"lengths": [3, 3, 3], "bias": torch.zeros(3, 3)}, r"bias tensor\(<float32 \(3, 3\)>\) has a tensor over"),
        ({"lengths": [3, 3, 3], "bias": biases.gaussian(torch.zeros(3), 1.0)}, r"bias gaussian\(.*no global positions"),
    ],
)
def test_calls_that_are_refused(pool, arguments, message):
    for answer in pool.run("call", 3, **arguments):
        with pytest.raises(ValueError, match=message):
            raise ValueError(answer)


def test_fewer_queries_are_at_the_last_positions(pool):
    assert pool.run("call", 3, lengths=[1, 1, 1], key_lengths=[3, 3, 3], mask=masks.causal()) == ["computed"] * 3


def test_without_a_process_group():
    query = torch.ones(1, 2, 4, 8)
    with pytest.raises(ConfigurationError, match=r"there is no process group: call torch.distributed.init_"):
        ring.attention(query, query, query)
    with pytest.raises(ConfigurationError, match="there is no process group"):
        ring.shard(query, 2)


def test_second_derivatives_are_refused(pool):
    answers = pool.run("attention", 2, case=RingCase(1, 8), create_graph=True)
    message = "a ring has no second derivatives: take them over shorter sequences, with regard.attention in one process"
    assert all(message in answer for answer in answers)


def test_a_compiled_function_around_a_call(program, tmp_path: Path):
    """torch.compile breaks the graph at the call, and compiles what is around it."""
    with Pool(program, tmp_path, 2, modules=["torch._dynamo.backends.debugging"]) as pool:
        for errors in pool.run("compiled", 2):
            assert max(errors) < 1e-6


def test_nan_in_a_key_reaches_the_rows_that_attend_to_it(pool):
    case = RingCase(3, 40, layout=ring.Zigzag(), mask="causal window")
    found = pool.run("nonfinite", 3, case=case, where=[20])[0]
    whole, options, _ = case.tensors(torch.float32)
    whole["key"][..., 20, :] = float("nan")
    above = whole.pop("above")
    inputs = [tensor.requires_grad_() for tensor in whole.values()]
    output = regard.attention(*inputs, kernel="tiled", **options)
    expected = [output.detach(), *torch.autograd.grad(output, inputs, above)]
    for has, needs in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(has, needs.numpy(), atol=1e-6)
    assert np.isnan(found["output"]).any()
    assert not np.isnan(found["value"]).any()


@pytest.mark.parametrize("factor", [3e4, 1e7])
def test_scores_beyond_float32(pool, factor):
    """Log-sum-exps of 10⁵ and more, merged over processes, have the weights of float64."""
    case = RingCase(5, 50, layout=ring.Zigzag(), mask="causal", factor=factor, sinks=True)
    found, truth = pool.run("attention", 3, case=case)[0], case.expected(torch.float64)
    single = case.expected(torch.float32)
    for name in ("output", "query", "key", "value"):
        size, error = truth[name].norm(), (torch.from_numpy(found[name]) - truth[name]).norm()
        assert error <= max(1e-6 * size, 2 * (single[name] - truth[name]).norm())


@pytest.mark.parametrize("how", ["killed", "absent", "backward", "killed in backward"])
def test_a_lost_process_ends_in_an_error_everywhere(program, tmp_path: Path, how):
    with Pool(program, tmp_path, 3, timeout=3.0) as pool:
        answers = pool.run("lose", 3, how=how, victim=1)
    assert answers[1] == ("lost" if how.startswith("killed") else answers[1])
    says = "rank 1 was lost"
    if not how.startswith("killed"):
        says += ", or did not make the same call within the group's timeout of 3 s"
    for rank in (0, 2):
        message, seconds = answers[rank]
        assert re.match(rf"RingError: rank {rank} of 3: (while the processes|in a message)", message)
        assert f", {says} (" in message
        assert seconds < 8


@pytest.mark.parametrize("victim", [0, 2])
def test_who_ended_because_of_a_loss_is_not_named_for_it(program, tmp_path: Path, victim):
    """Of four processes one is killed between two calls; who has met the loss ends, so that others meet both."""
    with Pool(program, tmp_path, 4, timeout=6.0) as pool:
        answers = pool.run("lose", 4, how="killed", victim=victim, ends_in=str(tmp_path / "told"))
    told = (tmp_path / "told").read_text().splitlines()
    assert answers == ["lost"] * 4
    assert len(told) == 3
    for line in told:
        assert re.search(rf": while the processes agreed on a call, rank {victim} was lost \(", line)


@pytest.mark.parametrize(
    ("head_parallel", "processes", "message"),
    [
        (2, 4, r"head_parallel=2 cannot divide 2 query heads and 1 key heads: .* one of \[1\]; the ring divides"),
        (3, 4, r"head_parallel=3 cannot divide the 4 processes .* one of \[1, 2, 4\]"),
        (0, 2, r"head_parallel is 0; it needs at least 1"),
    ],
)
def test_heads_that_cannot_be_divided(pool, head_parallel, processes, message):
    answers = pool.run("call", processes, lengths=[3] * processes, key_heads=1, head_parallel=head_parallel)
    for answer in answers:
        with pytest.raises(ValueError, match=message):
            raise ValueError(answer)
