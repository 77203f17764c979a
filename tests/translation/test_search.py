import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import RegardError
from regard.translation import search
from regard.translation.search import BeamHypothesis, beam_search, length_penalty
from regard.translation.settings import SearchSettings
from regard.translation.vocabulary import BEGIN, END, PAD, UNKNOWN

WORDS = 7  # PAD, UNKNOWN, BEGIN, END and three words
BODY = (UNKNOWN, 4, 5, 6)  # what a translation is made of


@dataclass(frozen=True)
class Rows:
    values: Tensor
    moves: list[int]  # shared by all that came from one

    def reorder(self, rows: Tensor) -> "Rows":
        self.moves.append(len(rows))
        return Rows(self.values[rows], self.moves)


@dataclass(frozen=True)
class Step:
    logits: Tensor
    state: Rows
    weights: Tensor
    self_weights: Tensor | None = None


class TableModel:
    """A random distribution for every prefix of every source, whose weights spell the prefix that asked.

    The first token of a source names it, and the state is the whole prefix, so that a row that continues the wrong beam
    or the wrong sentence shows in the probabilities and in the weights alike. Weights have dims between batch and
    source. Behind `longest` tokens only END can come.
    """

    def __init__(self, seed: int = 0, longest: int = 5, sharpness: float = 1.0) -> None:
        self.seed, self.longest, self.sharpness = seed, longest, sharpness
        self.steps = self.rows = 0
        self.memory_moves: list[int] = []
        self.state_moves: list[int] = []
        self.tables: dict[tuple[int, ...], Tensor] = {}

    def encode(self, source: Tensor, source_lengths: Tensor) -> Rows:
        return Rows(source, self.memory_moves)

    def start(self, memory: Rows) -> Rows:
        return Rows(torch.empty(len(memory.values), 0, dtype=torch.int64), self.state_moves)

    def step(self, tokens: Tensor, state: Rows, memory: Rows) -> Step:
        self.steps += 1
        self.rows += len(tokens)
        prefixes = torch.cat([state.values, tokens[:, None]], dim=1)
        names = memory.values[:, 0].tolist()
        logits = [self.logits(name, prefix[1:]) for name, prefix in zip(names, prefixes.tolist(), strict=True)]
        weights = torch.stack(
            [self.weights(name, prefix[1:]) for name, prefix in zip(names, prefixes.tolist(), strict=True)]
        )
        padding = memory.values.shape[1] - weights.shape[-1]
        return Step(
            torch.stack(logits), Rows(prefixes, state.moves), torch.nn.functional.pad(weights, (0, padding), value=-1.0)
        )

    max_target_length: int | None = None

    def observe_step(self, tokens: Tensor, state: Rows, memory: Rows) -> Step:
        return self.step(tokens, state, memory)

    def logits(self, name: int, prefix: list[int]) -> Tensor:
        key = (name, *prefix)
        if key not in self.tables:
            code = sum((token + 1) * 11**place for place, token in enumerate(key))
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + code) % 2**63)
            table = self.sharpness * torch.randn(WORDS, generator=generator)
            if len(prefix) >= self.longest:
                table[[token for token in range(WORDS) if token != END]] = -torch.inf
            self.tables[key] = table
        return self.tables[key]

    @staticmethod
    def weights(name: int, prefix: list[int]) -> Tensor:
        """[2, 3]: the source's name, the step, the prefix as one number; and the same negated."""
        row = torch.tensor([name, len(prefix), sum(token * 8**place for place, token in enumerate(prefix))])
        return torch.stack([row, -row]).double()

    def log_probability(self, name: int, ids: tuple[int, ...], *, finished: bool = True) -> float:
        path = [*ids, END] if finished else list(ids)
        return sum(
            self.logits(name, path[:place]).double().log_softmax(-1)[token].item() for place, token in enumerate(path)
        )


def sources(*rows: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Sources by name and length, padded."""
    lengths = torch.tensor([length for _, length in rows])
    source = torch.full((len(rows), int(lengths.max())), PAD)
    for place, (name, length) in enumerate(rows):
        source[place, :length] = name
    return source, lengths


def facts(hypotheses: list[BeamHypothesis]) -> list[tuple[tuple[int, ...], float, bool]]:
    return [(one.ids, round(one.score, 5), one.finished) for one in hypotheses]


def settings_of(beam: int = 1, n_best: int = 1, length_penalty: float = 0.0, **others: Any):
    told: dict[str, Any] = {"max_length_ratio": 1.0, **others}
    return SearchSettings(beam=beam, n_best=n_best, length_penalty=length_penalty, **told)


def worth(total: float, length: int, settings: SearchSettings) -> float:
    """The score of log P = total and a length."""
    base = (5 + length) / 6 if settings.penalty_form == "gnmt" else length
    return total / base**settings.length_penalty


def by_hand(model: TableModel, name: int, settings: SearchSettings, limit: int) -> tuple[list, int]:
    """Beam search as a sentence of plain Python lists, run to its limit: the n best, and when it might have stopped."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...], bool]] = []
    enough = limit
    for length in range(1, limit + 1):
        grown = sorted(
            (
                (total + log_p, (*ids, token))
                for total, ids in beams
                for token, log_p in enumerate(model.logits(name, list(ids)).double().log_softmax(-1).tolist())
                if token not in (PAD, BEGIN) and log_p > -math.inf
            ),
            reverse=True,
        )[: settings.beam]
        finished += [(worth(total, length, settings), ids[:-1], True) for total, ids in grown if ids[-1] == END]
        beams = [(total, ids) for total, ids in grown if ids[-1] != END]
        best = sorted(finished, reverse=True)[: settings.n_best]
        ceiling = worth(max((total for total, _ in beams), default=-math.inf), limit, settings)
        if (len(best) == settings.n_best and ceiling <= best[-1][0]) or not beams:
            enough = min(enough, length)
    cut = [(worth(total, limit, settings), ids, False) for total, ids in beams]
    return (sorted(finished, reverse=True) + sorted(cut, reverse=True))[: settings.n_best], enough


FORMS = pytest.mark.parametrize("form", ["gnmt", "length"])


@pytest.mark.covering(strength=1)
@FORMS
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_beam_as_large_as_the_space_finds_the_exact_optimum(alpha, form):
    model = TableModel(seed=9)
    source, lengths = sources((4, 3), (9, 4))
    everything = [ids for length in range(6) for ids in itertools.product(BODY, repeat=length)]
    settings = settings_of(beam=len(everything) * len(BODY), n_best=5, length_penalty=alpha, penalty_form=form)
    for name, found in zip((4, 9), beam_search(model, source, lengths, settings), strict=True):
        scored = [(worth(model.log_probability(name, ids), len(ids) + 1, settings), ids) for ids in everything]
        best = sorted(scored, reverse=True)[:5]
        assert [one.ids for one in found] == [ids for _, ids in best]
        assert [one.score for one in found] == pytest.approx([score for score, _ in best], abs=1e-5)


def test_the_length_penalty_changes_the_optimum_of_that_test():
    model = TableModel(seed=9)
    source, lengths = sources((4, 3), (9, 4))
    found = [
        [
            sentence[0].ids
            for sentence in beam_search(model, source, lengths, settings_of(beam=2000, length_penalty=alpha))
        ]
        for alpha in (0.0, 1.0)
    ]
    assert found[0] != found[1]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_beam_of_one_is_the_plain_argmax_loop(alpha):
    model = TableModel(seed=1, longest=8)
    names = list(range(4, 24))
    source, lengths = sources(*((name, 3) for name in names))
    found = beam_search(model, source, lengths, settings_of(length_penalty=alpha))
    for name, (best,) in zip(names, found, strict=True):
        ids: list[int] = []
        while True:
            logits = model.logits(name, ids).clone()
            logits[[PAD, BEGIN]] = -torch.inf
            token = int(logits.argmax())
            if token == END:
                break
            ids.append(token)
        assert best.ids == tuple(ids)
        assert best.log_probability == pytest.approx(model.log_probability(name, best.ids), abs=1e-5)
    assert len({len(best.ids) for (best,) in found}) > 3  # or the test would not see much


def test_greedy_search_runs_one_row_per_unfinished_sentence_and_moves_rows_only_when_a_sentence_leaves():
    model = TableModel(seed=1, longest=8)
    source, lengths = sources(*((name, 3) for name in range(4, 24)))
    found = beam_search(model, source, lengths, settings_of())
    sizes = [len(best.ids) + 1 for (best,) in found]
    assert model.rows == sum(sizes)
    assert model.steps == max(sizes)
    assert len(model.memory_moves) == len(model.state_moves) == len(set(sizes)) - 1


@FORMS
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize(("beam", "n_best"), [(1, 1), (2, 1), (3, 3), (5, 2)])
def test_it_finds_what_a_search_without_early_stopping_finds_and_stops_as_early_as_it_may(alpha, beam, n_best, form):
    settings = settings_of(beam=beam, n_best=n_best, length_penalty=alpha, penalty_form=form)
    for seed in range(6):
        model = TableModel(seed=seed, longest=9, sharpness=2.0)
        source, lengths = sources((4, 3))
        expected, enough = by_hand(model, 4, settings, limit=3 + search.EXTRA_LENGTH)
        (found,) = beam_search(model, source, lengths, settings)
        assert facts(found) == [(ids, round(score, 5), finished) for score, ids, finished in expected]
        assert model.steps == enough


def test_without_the_bound_a_longer_and_better_hypothesis_would_be_lost():
    # END at once has p = 0.5, "4 4 END" 0.45: at alpha = 0 the first wins, at alpha = 1 the second, which ends later.
    class Late(TableModel):
        def logits(self, name: int, prefix: list[int]) -> Tensor:
            table = torch.full((WORDS,), -torch.inf)
            if not prefix:
                table[END], table[4] = math.log(0.5), math.log(0.5)
            elif len(prefix) == 1:
                table[4], table[END] = math.log(0.9), math.log(0.1)
            else:
                table[END] = 0.0
            return table

    source, lengths = sources((4, 3))
    for alpha, ids in ((0.0, ()), (1.0, (4, 4))):
        [[best]] = beam_search(Late(), source, lengths, settings_of(beam=2, length_penalty=alpha))
        assert best.ids == ids


@pytest.mark.parametrize("beam", [1, 4])
def test_every_weight_is_that_of_the_hypothesis_it_comes_with(beam):
    model = TableModel(seed=2)
    shapes = [(name, 3 + name % 4) for name in range(4, 16)]
    source, lengths = sources(*shapes)
    found = beam_search(model, source, lengths, settings_of(beam=beam, n_best=beam, length_penalty=0.6))
    for (name, length), hypotheses in zip(shapes, found, strict=True):
        assert len(hypotheses) == beam
        for one in hypotheses:
            assert one.finished
            assert one.weights.shape == (len(one.ids) + 1, 2, length)
            for place, weights in enumerate(one.weights):
                assert torch.equal(weights[:, :3], model.weights(name, list(one.ids[:place])))


def test_the_n_best_are_sorted_and_distinct_and_none_holds_a_special_token():
    source, lengths = sources((4, 3), (5, 3), (6, 3))
    for hypotheses in beam_search(TableModel(), source, lengths, settings_of(beam=9, n_best=9, length_penalty=0.6)):
        scores = [one.score for one in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len({one.ids for one in hypotheses}) == len(hypotheses) == 9
        assert not {token for one in hypotheses for token in one.ids} & {PAD, BEGIN, END}


def test_a_sentence_has_the_same_translation_alone_in_company_and_in_any_order():
    shapes = [(name, 3 + name % 3) for name in range(4, 13)]
    settings = settings_of(beam=3, n_best=2, length_penalty=0.6)

    def translate(rows):
        return [facts(found) for found in beam_search(TableModel(), *sources(*rows), settings)]

    together = translate(shapes)
    assert [translate([shape])[0] for shape in shapes] == together
    assert translate(shapes[::-1]) == together[::-1]


def test_memory_follows_when_one_sentence_leaves_while_the_beams_of_another_grow():
    # One row each of two sentences become two rows of one: as many as before, and not the same.
    class Ends(TableModel):
        def logits(self, name: int, prefix: list[int]) -> Tensor:
            table = super().logits(name, prefix).clone()
            table[END] = 50.0 if name == 4 or len(prefix) == 3 else -50.0
            return table

    source, lengths = sources((4, 3), (5, 3))
    first, second = beam_search(Ends(), source, lengths, settings_of(beam=2))
    assert first[0].ids == ()
    assert facts(second) == facts(beam_search(Ends(), *sources((5, 3)), settings_of(beam=2))[0])
    assert second[0].weights[:, 0, 0].tolist() == [5.0] * 4


@pytest.mark.parametrize("beam", [1, 3])
def test_a_hypothesis_at_the_longest_length_is_cut_and_says_so(beam):
    class Endless(TableModel):
        def logits(self, name: int, prefix: list[int]) -> Tensor:
            return super().logits(name, prefix).clone().index_fill_(0, torch.tensor([END]), -torch.inf)

    model = Endless(longest=99)
    found = beam_search(model, *sources((4, 3), (5, 7)), settings_of(beam=beam, n_best=beam, max_length_ratio=1.5))
    for (name, longest), hypotheses in zip([(4, 5), (5, 11)], found, strict=True):
        assert len(hypotheses) == beam
        for one in hypotheses:
            assert not one.finished
            assert len(one.ids) == len(one.weights) == longest + search.EXTRA_LENGTH
            assert one.log_probability == pytest.approx(model.log_probability(name, one.ids, finished=False), abs=1e-4)


def test_what_was_cut_comes_behind_what_finished_whatever_its_score():
    class Choice(TableModel):
        """END now for 0.1, or 4 for ever at no further cost."""

        def logits(self, name: int, prefix: list[int]) -> Tensor:
            table = torch.full((WORDS,), -torch.inf)
            if not prefix:
                table[END], table[4] = math.log(0.1), math.log(0.9)
            else:
                table[4] = 0.0
            return table

    [[finished, cut]] = beam_search(Choice(), *sources((4, 3)), settings_of(beam=2, n_best=2))
    assert (finished.ids, finished.finished) == ((), True)
    assert (cut.ids, cut.finished) == ((4,) * (3 + search.EXTRA_LENGTH), False)
    assert cut.score > finished.score


def test_the_probability_is_the_models_own_where_pad_and_begin_are_likely():
    class Odd(TableModel):
        def logits(self, name: int, prefix: list[int]) -> Tensor:
            table = torch.zeros(WORDS)
            table[[PAD, BEGIN]] = 9.0
            table[END] = 1.0
            return table

    [[best]] = beam_search(Odd(), *sources((4, 3)), settings_of(beam=2))
    assert best.ids == ()
    assert best.log_probability == pytest.approx(1.0 - math.log(2 * math.exp(9) + math.e + 4), abs=1e-5)


def test_half_precision_logits_are_summed_in_float32():
    class Half(TableModel):
        def logits(self, name: int, prefix: list[int]) -> Tensor:
            return super().logits(name, prefix).bfloat16()

    model = Half()
    [[best]] = beam_search(model, *sources((4, 3)), settings_of(beam=4))
    assert best.log_probability == pytest.approx(model.log_probability(4, best.ids), abs=1e-5)


def test_no_sentences_give_no_hypotheses():
    empty = torch.empty(0, 3, dtype=torch.int64)
    assert beam_search(TableModel(), empty, torch.empty(0, dtype=torch.int64), settings_of()) == []


def test_a_search_leaves_no_gradient():
    class Learned(TableModel):
        scale = torch.nn.Parameter(torch.ones(()))

        def logits(self, name: int, prefix: list[int]) -> Tensor:
            return super().logits(name, prefix) * self.scale

    [[best]] = beam_search(Learned(), *sources((4, 3)), settings_of(beam=2))
    assert not best.weights.requires_grad
    assert torch.is_grad_enabled()


def test_a_model_of_nan_is_named():
    class Broken(TableModel):
        def logits(self, name: int, prefix: list[int]) -> Tensor:
            return torch.full((WORDS,), torch.nan) if name == 5 else super().logits(name, prefix)

    with pytest.raises(RegardError, match=r"sentence 1 of the batch has no translation: .* NaN or -inf"):
        beam_search(Broken(), *sources((4, 3), (5, 3)), settings_of(beam=2))


def test_the_length_penalty_is_that_of_wu_et_al():
    assert [length_penalty(length, 0.0) for length in (1, 9, 59)] == [1.0, 1.0, 1.0]
    assert length_penalty(20, 0.6) == pytest.approx((25 / 6) ** 0.6)


def test_the_length_alone_is_that_of_other_toolkits():
    assert [length_penalty(length, 1.0, "length") for length in (1, 9, 59)] == [1.0, 9.0, 59.0]
    assert length_penalty(20, 0.6, "length") == pytest.approx(20**0.6)
    assert length_penalty(20, 0.0, "length") == 1.0
