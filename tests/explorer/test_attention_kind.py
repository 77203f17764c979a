"""Which maps are of cross-attention, and which words stand beside them, where no name of an argument tells."""

from functools import partial

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.errors import AtlasError
from regard.explorer import Atlas, record

TARGET, SOURCE = list("abc"), list("vwxyz")


class Crossed(nn.Module):
    """Cross-attention of one's own."""

    def forward(self, target, source):
        return regard.attention(target, source, source)


class CalledOtherwise(nn.Module):
    def forward(this, target, source):  # noqa: N805  # pyright: ignore[reportSelfClsParameterName]
        return regard.attention(target, source, source)


class InTwoMethods(nn.Module):
    def forward(self, target, *sources):
        return self.attend(target[:, None], *(source[:, None] for source in sources))

    def attend(self, query, key):
        return regard.attention(query, key, key)


class Both(nn.Module):
    """Both kinds in one module, by a method that does not know which it is."""

    def forward(self, x, memory):
        return self.attend(self.attend(x, x), memory)

    def attend(self, query, source):
        return regard.attention(query, source, source, mask=masks.causal() if source.shape == query.shape else None)


class Selfish(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x, keys=None):
        query = x if keys is None else x[:, -keys:]
        return regard.attention(query * 1.5, x, x, **self.options)


class Translator(nn.Module):
    """Attention to one's own and to another sequence, told by nothing but what a module is given."""

    def __init__(self):
        super().__init__()
        self.self_attention, self.crossed = Selfish(mask=masks.causal()), Crossed()

    def forward(self, target, source):
        return self.crossed(self.self_attention(target), source)


def recorded(model, *inputs):
    with record(nn.ModuleDict({"model": model})) as recording:
        model(*inputs)
    return recording


def sides(shown):
    return shown.kind, "".join(shown.query_tokens), "".join(shown.key_tokens)


@pytest.mark.parametrize("model", [Crossed, CalledOtherwise, InTwoMethods])
@pytest.mark.parametrize("keys", [1, 2, 3, 4, 5])
def test_a_pair_of_words_is_used_as_it_is_given(model, keys):
    recording = recorded(model(), torch.randn(1, 3, 4), torch.randn(1, keys, 4))
    (shown,) = recording.atlas(tokens=(TARGET, SOURCE[:keys])).maps
    assert sides(shown) == ("cross", "abc", "vwxyz"[:keys])
    assert "distance" not in shown.metrics


def test_one_query_is_a_step_but_where_a_pair_is_given():
    recording = recorded(Crossed(), torch.randn(1, 1, 4), torch.randn(1, 5, 4))
    assert sides(recording.atlas(tokens=(["a"], SOURCE)).maps[0]) == ("cross", "a", "vwxyz")
    assert sides(recording.atlas(tokens=SOURCE).maps[0]) == ("self", "z", "vwxyz")


def test_fewer_queries_than_keys_are_cross_unless_they_look_back():
    inputs = torch.randn(1, 3, 4), torch.randn(1, 5, 4)
    assert recorded(Crossed(), *inputs).calls[0].kind == "cross"
    back = torch.ones(5, 5).tril()[-3:]
    ways = {
        "causal": {"mask": masks.causal()},
        "window": {"mask": masks.window(before=2, after=0)},
        "numbers": {"mask": masks.where(keep=back.bool())},
        "bias": {"bias": regard.biases.tensor(back.log().clamp(min=torch.finfo().min))},
        "both": {"mask": masks.padding(lengths=torch.tensor([4])) & masks.causal()},
    }
    for name, options in ways.items():
        (call,) = recorded(Selfish(**options), torch.randn(1, 5, 4), 3).calls
        assert call.kind == "self", name
    for options in ({}, {"mask": masks.padding(lengths=torch.tensor([5]))}, {"bias": regard.biases.tensor(back)}):
        (call,) = recorded(Selfish(**options), torch.randn(1, 5, 4), 3).calls
        assert call.kind == "cross"


def test_a_memory_of_another_method_says_nothing():
    recording = recorded(Both(), torch.randn(1, 3, 4), torch.randn(1, 5, 4))
    own, crossed = recording.atlas(tokens=(TARGET, SOURCE)).maps
    assert sides(own) == ("self", "abc", "abc")
    assert sides(crossed) == ("cross", "abc", "vwxyz")


def test_what_was_given_one_sequence_takes_one_side():
    """Both sides have as many words: the map of the target's own attention has the target's on both."""
    recording = recorded(Translator(), torch.randn(1, 3, 4), torch.randn(1, 3, 4))
    own, crossed = recording.atlas(tokens=(TARGET, SOURCE[:3])).maps
    assert sides(own) == ("self", "abc", "abc")
    assert sides(crossed) == ("cross", "abc", "vwx")


def test_two_arguments_that_are_one_sequence_are_self_attention():
    x = torch.randn(1, 3, 4)
    for other in (x, x.clone()):
        (shown,) = recorded(Crossed(), x, other).atlas(tokens=(TARGET, SOURCE[:3])).maps
        assert sides(shown) == ("self", "abc", "abc")


def test_a_mapping_tells_the_kind_of_a_map_by_its_whole_name():
    recording = recorded(Selfish(), torch.randn(1, 3, 4))
    pair = TARGET, SOURCE[:3]
    assert sides(recording.atlas(tokens={"": pair}).maps[0]) == ("self", "abc", "abc")
    assert sides(recording.atlas(tokens={"model": pair}).maps[0]) == ("cross", "abc", "vwx")
    weights = torch.full((1, 3, 3), 1 / 3)
    assert sides(Atlas.from_weights({"a": weights}, tokens={"a": pair}).maps[0]) == ("cross", "abc", "vwx")
    assert sides(Atlas.from_weights({"a": weights}, tokens=pair).maps[0]) == ("self", "abc", "abc")


def test_the_words_of_some_queries_on_a_cache_may_be_given():
    recording = recorded(Selfish(mask=masks.causal()), torch.randn(1, 5, 4), 3)
    assert sides(recording.atlas(tokens=(TARGET, SOURCE)).maps[0]) == ("self", "abc", "vwxyz")


def test_a_text_of_one_step_may_have_a_word_more():
    text = SOURCE, [*SOURCE, "!"]
    for options in ({"mask": masks.causal()}, {"mask": masks.where(keep=torch.ones(5, 5).tril().bool())}):
        recording = recorded(Selfish(**options), torch.randn(1, 5, 4))
        assert [sides(recording.atlas(tokens=words).maps[0]) for words in text] == [("self", "vwxyz", "vwxyz")] * 2
    make = partial(recorded(Selfish(), torch.randn(1, 5, 4)).atlas, tokens=text[1])
    with pytest.raises(AtlasError, match="tokens has 6 words, but 'model' has 5 keys"):
        make()
    layer = regard.nn.Attention(regard.nn.Projections(4, num_heads=1, memory_dim=4))
    with record(layer) as one:
        layer(torch.randn(1, 1, 4), memory=torch.randn(1, 5, 4))
    assert sides(one.atlas(tokens=(["a", "b"], SOURCE)).maps[0]) == ("cross", "a", "vwxyz")
