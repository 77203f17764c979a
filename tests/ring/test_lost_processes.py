"""What is said of a loss, by closed connections and by notes; tests with processes are in test_ring_calls.py."""

import time

import pytest
import torch.distributed as dist

from regard.ring import lost_processes
from regard.ring.lost_processes import Loss, describe_loss


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch):
    """`describe_loss` in rank 1 of 4: closed connections, and the notes that are read one time after the other."""

    def describe(closed: set[int], *notes: set[int] | None) -> str:
        left = list(notes)
        monkeypatch.setattr(dist, "get_rank", lambda group: 1)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
        monkeypatch.setattr(lost_processes, "NOTE_SECONDS", 0.2)
        monkeypatch.setattr(lost_processes, "_has_closed", lambda group, rank: rank in closed)

        class Told:
            def __init__(self, group: object) -> None:
                assert group == "a group"

            def write(self, rank: int) -> None:
                assert rank == 1

            def of(self, ranks: list[int]) -> set[int] | None:
                assert ranks == [0, 2, 3]
                return left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(lost_processes, "Notes", Told)
        return describe_loss("a group", 3.0)  # type: ignore[arg-type]

    return describe


def test_who_is_gone_without_a_note_was_lost(told):
    assert told({0, 2, 3}, {0, 3}) == "rank 2 was lost"
    assert told({0, 2}, {0}) == "rank 2 was lost"  # rank 3 has not met it yet
    assert told({0, 2, 3}, {3}) == "ranks 0 and 2 were lost"
    assert told({0, 2, 3}, set()) == "ranks 0, 2 and 3 were lost"


def test_a_note_may_be_on_its_way(told):
    assert told({2, 3}, set(), {3}, {3, 0}) == "rank 2 was lost"


def test_who_is_there_without_a_note_did_not_make_the_call(told):
    within = "lost, or did not make the same call within the group's timeout of 3 s"
    assert told(set(), {0, 3}) == f"rank 2 was {within}"
    assert told({3}, {3}) == f"ranks 0 and 2 were {within}"
    assert told({0, 3}, {0, 2, 3}) == f"a process was {within}"


def test_without_an_answer_of_the_store(told):
    assert told({2}, None) == "rank 2 was lost"
    message = "ranks 0 and 2 were lost, or ended because another one was: the group's store, which would tell, "
    assert told({0, 2}, None) == f"{message}does not answer"
    within = "lost, or did not make the same call within the group's timeout of 3 s"
    assert told(set(), None) == f"a process was {within}"


def test_a_store_that_is_lost_is_not_waited_for():
    def fails() -> int:
        raise RuntimeError("connection reset")

    assert lost_processes._within(5.0, fails) is None
    assert lost_processes._within(5.0, lambda: 3) == 3
    begun = time.monotonic()
    assert lost_processes._within(0.05, lambda: time.sleep(3)) is None
    assert time.monotonic() - begun < 2


def test_a_group_of_one_has_lost_nobody():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.distributed_c10d._get_default_group()
        assert Loss.find(group, 0, []) == Loss([], [], [])
        assert lost_processes.Notes(group).of([0]) == {0}
    finally:
        dist.destroy_process_group()
