"""How sequences are cut: positions of each process, balance, and what shard and unshard do with tensors."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import MOST

import regard.ring as ring
from regard import masks
from regard.errors import ConfigurationError, ShapeError
from regard.kernels.validation import make_problem
from regard.ring.hops import HopPlan, plan_hops
from regard.ring.layout import Shards, place
from regard.ring.peers import Peers

LAYOUTS = [ring.Contiguous(), ring.Zigzag(), ring.Striped()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("processes", range(1, MOST + 1))
def test_each_position_belongs_to_one_process(layout, processes):
    for length in (processes, processes + 1, 7 * processes + 3):
        shards = place(layout, length, processes)
        positions = torch.cat([shards.positions(process) for process in range(processes)])
        assert positions.sort().values.equal(torch.arange(length))
        assert max(shards.lengths) - min(shards.lengths) <= 2


@pytest.mark.parametrize("layout", [*LAYOUTS, ring.Contiguous((3, 7, 1))])
def test_shards_and_the_whole(pool, layout):
    for whole_again, gradient in (answer[1:] for answer in pool.run("shards", 3, length=11, layout=layout)):
        assert whole_again
        assert gradient


def test_the_positions_of_a_shard(pool):
    answers = pool.run("shards", 2, length=8, layout=ring.Zigzag())
    assert [numbers[::2] for numbers, *_ in answers] == [[0, 2, 12, 14], [4, 6, 8, 10]]


def plan(mask: masks.Mask | None, shards: Shards, rank: int) -> HopPlan:
    tensor = torch.empty(1, 2, shards.lengths[rank], 4)
    return plan_hops(make_problem(tensor, tensor, tensor, mask=mask), shards, shards, rank)


@pytest.mark.parametrize(("before", "shard"), [(511, 1024), (1024, 1024), (1025, 1024), (2500, 1024), (300, 256)])
def test_a_window_talks_to_few_neighbours(before, shard):
    """A window of W keys over shards of S talks to ⌈W/S⌉ + 1 processes, this one among them."""
    shards = place(ring.Contiguous(), 8 * shard, 8)
    mask = masks.causal() & masks.window(before=before)
    for rank in range(8):
        sources = plan(mask, shards, rank).sources
        assert 1 + len(sources) <= -(-(before + 1) // shard) + 1
        assert sorted(sources) == [other for other in range(8) if 0 < rank - other <= -(-before // shard)]


def test_a_causal_mask_sends_half_of_the_keys_of_a_zigzag():
    shards = place(ring.Zigzag(), 4096, 4)
    assert [plan(masks.causal(), shards, rank).keys_sent for rank in range(4)] == [
        512 * (3 + rank) for rank in range(4)
    ]


def test_blocks_of_all_hops_have_each_pair_once():
    length = 300
    for layout in LAYOUTS:
        for mask in (
            None,
            masks.causal(),
            masks.window(before=20),
            masks.strided(7),
            masks.prefix(3) | masks.window(5),
        ):
            shards, met = place(layout, length, 3), torch.zeros(length, length, dtype=torch.int64)
            for rank in range(3):
                rows = shards.positions(rank)
                for hop in plan(mask, shards, rank).hops:
                    owned = shards.positions(hop.source)
                    received = torch.cat([owned[span] for span in hop.received] or [owned[:0]])
                    for block in hop.blocks:
                        queries, keys = torch.tensor(block.query_positions), torch.tensor(block.key_positions)
                        assert rows[block.rows].equal(queries)
                        assert received[block.columns].equal(keys)
                        met[queries[:, None], keys] += 1
                        assert (
                            not block.is_full
                            or mask is None
                            or bool(
                                mask.dense(len(queries), len(keys), query_positions=queries, key_positions=keys).all()
                            )
                        )
            assert met.max() == 1
            needed = torch.ones(length, length, dtype=torch.bool) if mask is None else mask.dense(length, length)
            assert bool((met.bool() | ~needed).all())


def test_blocks_below_the_diagonal_need_no_mask():
    shards = place(ring.Zigzag(), 512, 4)
    own, *others = (hop.blocks for hop in plan(masks.causal(), shards, 0).hops)
    assert [block.is_full for block in own] == [False, True, False]
    assert all(block.is_full for blocks in others for block in blocks)


def test_what_is_sent_is_what_is_received():
    shards = place(ring.Zigzag(), 500, 4)
    mask = masks.causal() & (masks.window(before=40) | masks.prefix(2))
    plans = [plan(mask, shards, rank) for rank in range(4)]
    for rank, own in enumerate(plans):
        for hop in own.hops:
            (other,) = (theirs for theirs in plans[hop.destination].hops if theirs.source == rank)
            assert other.received == hop.sent


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (masks.causal(), ring.Zigzag()),
        (masks.causal() & masks.window(before=100), ring.Contiguous()),
        (None, ring.Contiguous()),
    ],
)
def test_balanced_layouts(mask, expected):
    assert ring.balanced(mask, 8192, 4) == expected


def test_documents_of_several_sizes_are_cut_where_pairs_are_equal():
    ids = torch.zeros(4096, dtype=torch.int64)
    ids[2048:] = torch.arange(2048) // 64 + 1
    mask = masks.documents(ids)
    layout = ring.balanced(mask, 4096, 2)
    dense = mask.dense(4096, 4096).sum(-1)
    loads = [int(dense[place(layout, 4096, 2).positions(process)].sum()) for process in range(2)]
    assert max(loads) < 1.1 * sum(loads) / 2


def test_layouts_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"3 tokens cannot be cut for 4 processes, of which each needs at least one"):
        place(ring.Zigzag(), 3, 4)
    with pytest.raises(ShapeError, match=r"cuts 7 positions for 2 processes; it needs at least one .* of 3 processes"):
        place(ring.Contiguous((3, 4)), 9, 3)
    with pytest.raises(ConfigurationError, match=r"layout is 'zigzag'; it needs a layout such as .*Zigzag\(\)"):
        place("zigzag", 9, 3)  # type: ignore[arg-type]


class Overlapping:
    """A layout whose processes have one position in common."""

    def pieces(self, length: int, processes: int) -> list[list[range]]:
        return [[range(length)] for _ in range(processes)]


def test_a_layout_of_ones_own_is_checked():
    with pytest.raises(ShapeError, match=r"each of 0\.\.8 one process"):
        place(Overlapping(), 9, 3)


def test_a_device_mesh_is_a_group(pool):
    assert pool.run("mesh", dimensions=(MOST,)) == [[0, 1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    for answer in pool.run("mesh", dimensions=(1, MOST)):
        assert answer.startswith("ConfigurationError: the mesh has 2 dimensions, (1, 5); a ring needs one: choose it")


@pytest.fixture
def alone():
    """A group of this process."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Peers.from_group(None)
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_device_that_the_backend_does_not_send_from(alone, device):
    message = f"tensors are on {device}, from where the backend of the group, 'gloo', sends no messages: call torch.dis"
    with pytest.raises(ConfigurationError, match=message):
        alone.check_device(torch.device(device))
    alone.check_device(torch.device("cpu"))
    if device == "meta":
        with pytest.raises(ConfigurationError, match=message):
            ring.unshard(torch.zeros(3, 2, device=device), 0)
        with pytest.raises(ConfigurationError, match=message):
            ring.linear_attention(*torch.zeros(3, 1, 2, 4, 8, device=device))


@dataclass
class GroupOf:
    """A group of these kinds of devices, of which the first call of each is noted."""

    _device_types: list[torch.device]
    sums: list[torch.device] = field(default_factory=list)
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("kinds", "numbers"), [(["cuda"], "cuda"), (["cuda", "cpu"], "cpu"), (["cpu"], "cpu"), (["xpu"], "xpu")]
)
def test_numbers_are_sent_from_a_device_of_the_group(kinds, numbers):
    """Of NCCL from the accelerator; of a group with both, from the CPU, which waits for no stream."""
    group: Any = GroupOf([torch.device(kind) for kind in kinds])
    assert Peers(group, 0, 1).device == numbers


def test_an_accelerator_is_connected_once_by_all_processes(monkeypatch):
    """Its first call is one that all processes take part in, before messages between some of them."""
    group: Any = GroupOf([torch.device("meta")])
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, operation, group: group.sums.append(tensor.device))
    for device in ("cpu", "meta", "meta"):
        Peers(group, 0, 1).connect(torch.device(device))
    assert group.sums == [torch.device("meta")]
