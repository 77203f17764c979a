import pytest
import torch

from regard.errors import CheckpointError
from regard.translation.alignment_choice import AlignmentChoice, ObservedPair, best_choice


def pair(size, layer, head, shift):
    """A pair of `size` words turned round, which one head links, `shift` steps late, and others straight; its links."""
    straight = torch.arange(size + 1).clamp(max=size - 1)
    weights = torch.nn.functional.one_hot(straight, size).float()[:, None, None].repeat(1, 2, 3, 1)
    links = frozenset((size - 1 - row, row) for row in range(size))
    for source, target in links:
        weights[target + shift, layer, head] = torch.nn.functional.one_hot(torch.tensor(source), size).float()
    return ObservedPair(weights, range(size), range(size)), links


@pytest.mark.parametrize(("layer", "head", "shift", "step"), [(1, 2, 0, "says"), (0, 1, 1, "reads")])
def test_the_head_and_the_step_of_the_links_are_found(layer, head, shift, step):
    choice = best_choice(pair(size, layer, head, shift) for size in (3, 5, 7, 8))
    assert choice == AlignmentChoice(layer, head, step, error_rate=0.0, pairs=4)


def test_of_one_map_the_step_alone_is_chosen():
    weights = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.1, 0.9]])
    seen = ObservedPair(weights, [0, 1], [0, 1])
    assert best_choice([(seen, frozenset({(0, 0), (1, 1)}))]).step == "reads"


def test_nothing_seen_chooses_the_mean():
    assert best_choice([]) == AlignmentChoice()


def test_a_choice_is_kept_in_the_folder(tmp_path):
    assert AlignmentChoice.load(tmp_path) is None
    choice = AlignmentChoice(1, 2, "reads", 0.25, 1000)
    choice.save(tmp_path)
    assert AlignmentChoice.load(tmp_path) == choice
    (tmp_path / "alignment.json").write_text('{"step": "sees"}')
    with pytest.raises(
        CheckpointError, match=r"alignment.json cannot be read: step is 'sees', and needs to be one of says, reads"
    ):
        AlignmentChoice.load(tmp_path)
