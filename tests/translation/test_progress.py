import pytest

from regard.translation.batches import EncodedText, IdSequences, OrderedBatches, TokenBatches
from regard.translation.progress import AllBatches, BatchesToNextStop, StopSchedule, TextPosition


def text(pairs: int) -> EncodedText:
    ids = IdSequences.pack([[4 + number] for number in range(pairs)])
    return EncodedText(ids, ids)


def stops_of(every: float, batches: int = 5, epochs: int = 3) -> list[int]:
    stops, position, found = StopSchedule(every, batches, epochs), TextPosition(), []
    while position.epoch < epochs:
        position = position.after_update(batches)
        if stops.stops_at(position):
            found.append(position.update)
    return found


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (1.0, [5, 10, 15]),
        (0.5, [3, 5, 8, 10, 13, 15]),
        (0.4, [2, 4, 5, 7, 9, 10, 12, 14, 15]),
        (0.01, list(range(1, 16))),
        (1, list(range(1, 16))),
        (4, [4, 8, 12, 15]),
        (100, [15]),
    ],
)
def test_stops_are_where_they_are_asked_for_and_at_the_end(every: float, expected: list[int]):
    assert stops_of(every) == expected


def batches_from(position: TextPosition, every: float) -> list[list[list[int]]]:
    """What each stretch gives, source ids of each batch, from a position to the end."""
    words = text(9)
    plan = TokenBatches(words, batch_tokens=4, seed=1)
    stops = StopSchedule(every, len(plan), max_epochs=2)
    stretches = BatchesToNextStop(words, plan, stops, lambda: position)
    given = []
    while position.epoch < 2:
        batches = list(stretches)
        assert batches, "a stretch gives at least one batch"
        for _ in batches:
            position = position.after_update(len(plan))
        assert stops.stops_at(position)
        given.append([batch.source.flatten().tolist() for batch in batches])
    return given


def test_stretches_from_any_position_give_the_rest_of_the_same_batches():
    whole = [batch for stretch in batches_from(TextPosition(), every=1.0) for batch in stretch]
    epoch = len(whole) // 2
    for given in (whole[:epoch], whole[epoch:]):
        assert sorted(word for batch in given for word in batch) == [4 + number for number in range(9)]
    assert whole[:epoch] != whole[epoch:]
    for every in (1, 3, 0.5, 1.0):
        for update in range(len(whole)):
            position = TextPosition(epoch=update // epoch, batch=update % epoch, update=update)
            assert [batch for stretch in batches_from(position, every) for batch in stretch] == whole[update:]


def test_a_run_that_is_over_has_no_more_batches():
    words = text(3)
    plan = TokenBatches(words, batch_tokens=4, seed=1)
    assert list(BatchesToNextStop(words, plan, StopSchedule(1.0, len(plan), 2), lambda: TextPosition(epoch=2))) == []


def test_a_sweep_gives_everything_each_time_even_if_that_is_nothing():
    words = text(3)
    sweep = AllBatches(words, OrderedBatches(words, batch_tokens=4))
    assert [len(batch) for batch in sweep] == [len(batch) for batch in sweep] == [2, 1]
    assert list(AllBatches(words, OrderedBatches(words, batch_tokens=100, rank=1, world_size=2))) == []


def test_a_run_ends_after_its_last_update_wherever_that_is_in_an_epoch():
    stops = StopSchedule(1.0, batches_per_epoch=5, max_epochs=3, max_updates=7)
    places = [TextPosition(epoch=1, batch=1, update=6), TextPosition(epoch=1, batch=2, update=7)]
    assert [stops.stops_at(place) for place in places] == [False, True]
    assert [stops.ends_at(place) for place in places] == [False, True]
    assert not list(BatchesToNextStop(text(9), TokenBatches(text(9), 4, seed=1), stops, lambda: places[1]))
    rest = BatchesToNextStop(
        text(9), TokenBatches(text(9), 4, seed=1), stops, lambda: TextPosition(epoch=1, batch=1, update=6)
    )
    assert len(list(rest)) == 1
