"""Constrained search against all translations that there are, of a model with a distribution for every prefix."""

import itertools
import math

import pytest
import torch
from test_search import BODY, WORDS, TableModel, facts, settings_of, sources, worth

from regard.errors import ConfigurationError, RegardError
from regard.translation.constrained_search import Phrase, WordEdges, best_of_groups, constrained_search
from regard.translation.search import beam_search
from regard.translation.vocabulary import END, OWN_IDS, SpecialIds

LOOSE = WordEdges(torch.zeros(WORDS, dtype=torch.bool), torch.zeros(WORDS, dtype=torch.bool))
ALL = 500
"""Beams enough to hold every translation of five tokens."""


def times_said(ids: tuple[int, ...], phrase: tuple[int, ...]) -> int:
    """How often a phrase is said, without overlap, from the left."""
    count = start = 0
    while start + len(phrase) <= len(ids):
        said = ids[start : start + len(phrase)] == phrase
        count, start = count + said, start + (len(phrase) if said else 1)
    return count


def holds(ids: tuple[int, ...], phrases: list[Phrase]) -> bool:
    return all(times_said(ids, phrase.ids) >= phrase.times for phrase in phrases)


def best_by_hand(model: TableModel, name: int, phrases: list[Phrase], settings) -> list:
    """The n best of all translations that hold the phrases."""
    every = (ids for length in range(model.longest + 1) for ids in itertools.product(BODY, repeat=length))
    scored = [
        (ids, worth(model.log_probability(name, ids), len(ids) + 1, settings)) for ids in every if holds(ids, phrases)
    ]
    return sorted(scored, key=lambda one: -one[1])[: settings.n_best]


PHRASES = [
    [Phrase((4,))],
    [Phrase((5, 4))],
    [Phrase((4,), times=3)],
    [Phrase((4, 4))],
    [Phrase((4, 4), times=2)],
    [Phrase((4, 4, 5))],
    [Phrase((4, 5, 4, 6))],
    [Phrase((4, 5)), Phrase((5, 6))],
    [Phrase((4, 5)), Phrase((5,))],
    [Phrase((6,)), Phrase((1,)), Phrase((5, 4))],
]


@pytest.mark.parametrize("phrases", PHRASES, ids=str)
@pytest.mark.parametrize("length_penalty", [0.0, 1.3])
def test_with_beams_for_all_it_finds_the_best_of_all_that_hold_the_phrases(phrases, length_penalty):
    model = TableModel(seed=3)
    settings = settings_of(beam=ALL, n_best=3, length_penalty=length_penalty)
    names = [(2, 3), (7, 5), (5, 4)]
    found = constrained_search(model, *sources(*names), [phrases] * 3, LOOSE, settings)
    for (name, _), some in zip(names, found, strict=True):
        best = best_by_hand(model, name, phrases, settings)
        assert [one.ids for one in some] == [ids for ids, _ in best]
        assert [one.score for one in some] == pytest.approx([score for _, score in best], abs=1e-4)
        assert all(one.finished for one in some)


class LookingModel(TableModel):
    """A model that looks at three tokens of the source, somewhere at each step."""

    def weights(self, name: int, prefix: list[int]) -> torch.Tensor:
        code = sum((token + 2) * 13**place for place, token in enumerate((name, *prefix)))
        generator = torch.Generator().manual_seed((self.seed * 7_000_003 + code) % 2**63)
        return (2 * torch.randn(3, generator=generator)).softmax(-1)


def begun(ids: tuple[int, ...], phrase: Phrase) -> int:
    """How many first tokens of a phrase were just said, which is not said often enough."""
    if times_said(ids, phrase.ids) >= phrase.times:
        return 0
    said = times_said(ids, phrase.ids)
    end = next(end for end in range(len(ids) + 1) if times_said(ids[:end], phrase.ids) == said)
    rest = ids[end if said else 0 :]
    return max(
        count
        for count in range(len(phrase.ids))
        if count <= len(rest) and rest[len(rest) - count :] == phrase.ids[:count]
    )


def log_q(model: LookingModel, name: int, ids: tuple[int, ...], phrases: list[Phrase]) -> float:
    """log Q of a translation that holds the phrases: generated[t] is that of its first t tokens."""
    path, generated = (*ids, END), [1.0]
    for step, token in enumerate(path):
        before, now = ids[:step], ids[: step + 1]
        p = math.exp(model.logits(name, list(before)).double().log_softmax(-1)[token].item())
        looked = attention(model, name, before, phrases)
        total = generated[step] * (1 - sum(looked)) * p
        for number, phrase in enumerate(phrases):
            start = step + 1 - len(phrase.ids)
            said = times_said(before, phrase.ids) < min(times_said(now, phrase.ids), phrase.times)
            if said and token != END and begun(ids[:start], phrase) == 0:
                total += generated[start] * attention(model, name, ids[:start], phrases)[number]
        generated.append(total)
    return math.log(generated[-1])


def attention(model: LookingModel, name: int, before: tuple[int, ...], phrases: list[Phrase]) -> list[float]:
    """a_p of each phrase."""
    looked = [
        sum(model.weights(name, list(before)).double()[place].item() for place in phrase.source)
        if times_said(before, phrase.ids) < phrase.times and begun(before, phrase) == 0
        else 0.0
        for phrase in phrases
    ]
    return [0.5 * one / max(1.0, sum(looked)) for one in looked]


@pytest.mark.parametrize(
    "phrases",
    [
        [Phrase((4,), 1, (1,))],
        [Phrase((5, 4), 1, (0, 2))],
        [Phrase((4,), 2, (0, 1))],
        [Phrase((4, 4), 1, (2,))],
        [Phrase((4, 4, 5), 1, (0,))],
        [Phrase((4, 5), 1, (1,)), Phrase((5, 6), 1, (2,))],
        [Phrase((4, 5), 1, (0, 1)), Phrase((5,), 1, (1, 2))],
        [Phrase((6,)), Phrase((1,), 1, (2,)), Phrase((5, 4), 1, (0,))],
    ],
    ids=str,
)
@pytest.mark.parametrize("length_penalty", [0.0, 1.3])
def test_phrases_come_where_the_model_looks_at_their_source(phrases, length_penalty):
    model, settings = LookingModel(seed=3), settings_of(beam=ALL, n_best=3, length_penalty=length_penalty)
    names = [(2, 3), (5, 3)]
    found = constrained_search(model, *sources(*names), [phrases] * 2, LOOSE, settings, observe=False)
    every = [ids for length in range(model.longest + 1) for ids in itertools.product(BODY, repeat=length)]
    for (name, _), some in zip(names, found, strict=True):
        held = [ids for ids in every if holds(ids, phrases)]
        scored = [(worth(log_q(model, name, ids, phrases), len(ids) + 1, settings), ids) for ids in held]
        best = sorted(scored, reverse=True)[:3]
        assert [one.ids for one in some] == [ids for _, ids in best]
        assert [one.score for one in some] == pytest.approx([score for score, _ in best], abs=1e-4)
        totals = [model.log_probability(name, one.ids) for one in some]
        assert [one.log_probability for one in some] == pytest.approx(totals, abs=1e-4)
        assert all(one.weights.shape == (len(one.ids) + 1, 0, 3) for one in some)


def test_each_sentence_of_a_batch_has_phrases_of_its_own():
    model, settings = TableModel(seed=5), settings_of(beam=3, n_best=2, length_penalty=0.7)
    names = [(name, 4) for name in range(1, len(PHRASES) + 1)]
    together = constrained_search(model, *sources(*names), PHRASES, LOOSE, settings)
    for name, phrases, found in zip(names, PHRASES, together, strict=True):
        [alone] = constrained_search(model, *sources(name), [phrases], LOOSE, settings)
        assert facts(found) == facts(alone)
        for one in found:
            assert holds(one.ids, phrases)
            total = model.log_probability(name[0], one.ids)
            assert one.log_probability == pytest.approx(total, abs=1e-4)
            expected = [model.weights(name[0], list(one.ids[:step])) for step in range(len(one.ids) + 1)]
            assert torch.equal(one.weights[..., :3], torch.stack(expected))


def test_what_is_said_anyway_changes_nothing():
    model, settings = TableModel(seed=8), settings_of(beam=4, length_penalty=0.5)
    for name in range(12):
        [[best]] = beam_search(model, *sources((name, 4)), settings)
        if not best.ids:
            continue
        [[found]] = constrained_search(model, *sources((name, 4)), [[Phrase(best.ids)]], LOOSE, settings)
        # The beam of those that said nothing yet is as wide, so that nothing worse can be found.
        assert found.score >= best.score - 1e-5


def test_wider_beams_are_no_worse_on_average():
    model = TableModel(seed=9)
    scores = []
    for beam in (1, 3, 10):
        found = constrained_search(
            model, *sources(*[(name, 4) for name in range(20)]), [PHRASES[7]] * 20, LOOSE, settings_of(beam=beam)
        )
        scores.append(sum(one.score for [one] in found))
    assert scores[0] < scores[1] <= scores[2]


def test_no_word_goes_on_behind_or_into_a_phrase():
    """Tokens 5 and 6 are letters that join the word before them; token 4 begins a word."""
    model, settings = TableModel(seed=3), settings_of(beam=ALL)
    letters = torch.tensor([False, False, False, False, False, True, True])
    edges = WordEdges(joins=letters, ends_in_letter=letters | (torch.arange(WORDS) == 4))
    for phrase in ((4,), (4, 5), (5,), (5, 6)):
        [[found]] = constrained_search(model, *sources((2, 4)), [[Phrase(phrase)]], edges, settings)
        places = [
            start
            for start in range(len(found.ids))
            if found.ids[start : start + len(phrase)] == phrase
            and (start == 0 or phrase[0] == 4 or found.ids[start - 1] not in (4, 5, 6))
            and found.ids[start + len(phrase) : start + len(phrase) + 1] not in ((5,), (6,))
        ]
        assert places, (phrase, found.ids)


def test_a_translation_begins_with_the_token_of_its_language():
    special = SpecialIds(OWN_IDS.pad, OWN_IDS.unknown, OWN_IDS.begin, OWN_IDS.end, OWN_IDS.never_said, first=6)
    model, settings = TableModel(seed=3), settings_of(beam=4)
    [[found]] = constrained_search(model, *sources((2, 4)), [[Phrase((5, 4))]], LOOSE, settings, special=special)
    assert found.ids[0] == 6
    assert holds(found.ids, [Phrase((5, 4))])
    total = model.log_probability(2, found.ids) - model.logits(2, []).double().log_softmax(-1)[6].item()
    assert found.log_probability == pytest.approx(total, abs=1e-4)


def test_at_the_longest_length_the_phrases_are_there():
    model = TableModel(seed=3, longest=10**9)
    model.logits = lambda name, prefix: TableModel.logits(model, name, prefix).index_fill(
        0, torch.tensor(END), -math.inf
    )
    model.max_target_length = 6
    phrases = [Phrase((4, 5)), Phrase((6,))]
    [[found]] = constrained_search(model, *sources((2, 3)), [phrases], LOOSE, settings_of(beam=2))
    assert (len(found.ids), found.finished) == (6, False)
    assert holds(found.ids, phrases)


def test_more_than_the_model_allows_is_refused():
    model, phrases = TableModel(), [[Phrase((4, 5), times=2)]]
    model.max_target_length = 6
    message = "the forced words have up to 6 tokens and the spaces between them, and a translation of this model 6 at"
    with pytest.raises(ConfigurationError, match=message):
        constrained_search(model, *sources((2, 3)), phrases, LOOSE, settings_of())


def test_a_model_that_cannot_say_a_phrase_is_named():
    model = TableModel(longest=1)
    with pytest.raises(RegardError, match="sentence 0 of the batch has no translation with the forced words"):
        constrained_search(model, *sources((2, 3)), [[Phrase((4, 5))]], LOOSE, settings_of(beam=2))
    model.logits = lambda name, prefix: torch.full((WORDS,), math.nan)
    with pytest.raises(RegardError, match="its logits hold NaN or -inf"):
        constrained_search(model, *sources((2, 3)), [[Phrase((4, 5))]], LOOSE, settings_of(beam=2))


def test_the_best_of_groups_are_those_of_sorting():
    generator = torch.Generator().manual_seed(1)
    groups = torch.randint(0, 7, (131,), generator=generator)
    scores = torch.rand(131, generator=generator)
    found = best_of_groups(groups, scores, 5).tolist()
    expected = []
    for group in range(7):
        places = (groups == group).nonzero()[:, 0].tolist()
        expected += sorted(places, key=lambda place: -scores[place].item())[:5]
    assert found == expected
