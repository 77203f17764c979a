"""The Transformer is the paper's, and torch's; a step at a time is the same as all steps at once."""

from typing import Any

import pytest
import torch
from torch import nn

from regard.errors import ConfigurationError, ShapeError
from regard.lenses import Entropy, Weights
from regard.masks import causal
from regard.models import Transformer
from regard.models.transformer import Decoder, Embedding, Encoder, TiedOutput
from regard.nn import Attention, FeedForward, PostNorm, PreNorm, Projections, TransformerBlock
from regard.positions import Learned
from regard.translation.build_model import build_model
from regard.translation.search import beam_search
from regard.translation.settings import SearchSettings, TransformerSettings

# Primes, so that no two axes can be taken for each other.
BATCH, SOURCE, TARGET, SOURCE_SIZE, TARGET_SIZE = 3, 11, 5, 19, 23
DIM, HEADS, HIDDEN, LAYERS = 12, 3, 17, 2
LENGTHS = torch.tensor([11, 4, 1])

SETTINGS = {
    "post": {},
    "pre": {"norm": "pre"},
    "learned": {"positions": {"kind": "learned", "length": 13}},
    "rotary": {"positions": "rotary", "norm": "pre"},
    "target-shared": {"shared_embeddings": "target"},
}


def settings(**options):
    sizes = {"dim": DIM, "num_heads": HEADS, "hidden_dim": HIDDEN, "encoder_layers": 1, "decoder_layers": LAYERS}
    return TransformerSettings.model_validate(sizes | options)


def transformer(**options) -> Transformer:
    torch.manual_seed(1)
    return built(settings(**options), TARGET_SIZE).eval()


def built(told: TransformerSettings, target_size: int) -> Transformer:
    model = build_model(told, SOURCE_SIZE, target_size)
    assert isinstance(model, Transformer)
    return model


def batch():
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(1, SOURCE_SIZE, (BATCH, SOURCE), generator=generator)
    source[torch.arange(SOURCE) >= LENGTHS[:, None]] = 0
    return source, LENGTHS, torch.randint(1, TARGET_SIZE, (BATCH, TARGET), generator=generator)


by_settings = pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())


def block(kind=PostNorm, *, memory=False, mask="own"):
    return TransformerBlock(
        Attention(Projections(DIM, HEADS), mask=causal() if memory and mask == "own" else None),
        FeedForward(DIM, HIDDEN),
        lambda: kind(nn.LayerNorm(DIM)),
        cross_attention=Attention(Projections(DIM, HEADS)) if memory else None,
    )


def copied_attention(ours: Any, theirs: Any) -> None:
    query, key, value = theirs.in_proj_weight.chunk(3)
    biases = theirs.in_proj_bias.chunk(3)
    parts = ours.projections
    for linear, weight, bias in zip((parts.query, parts.key, parts.value), (query, key, value), biases, strict=True):
        linear.load_state_dict({"weight": weight, "bias": bias})
    parts.output.load_state_dict(theirs.out_proj.state_dict())


def copied_block(ours: Any, theirs: Any) -> None:
    copied_attention(ours.attention, theirs.self_attn)
    norms = [theirs.norm1, theirs.norm2] + ([theirs.norm3] if ours.cross_attention else [])
    residuals = [ours.attention_residual, *([ours.cross_residual] if ours.cross_attention else [])]
    for residual, norm in zip([*residuals, ours.feed_forward_residual], norms, strict=True):
        residual.norm.load_state_dict(norm.state_dict())
    if ours.cross_attention:
        copied_attention(ours.cross_attention, theirs.multihead_attn)
    ours.feed_forward.up.load_state_dict(theirs.linear1.state_dict())
    ours.feed_forward.down.load_state_dict(theirs.linear2.state_dict())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch tells of a fast path that it does not take here
@pytest.mark.parametrize("kind", [PreNorm, PostNorm])
def test_it_is_torchs_transformer(kind):
    torch.manual_seed(3)
    theirs: Any = nn.Transformer(
        DIM, HEADS, LAYERS, LAYERS, HIDDEN, dropout=0.0, batch_first=True, norm_first=kind is PreNorm
    ).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases and norms are to make a difference
    tokens = nn.Embedding(SOURCE_SIZE, DIM)
    model = Transformer(
        Embedding(tokens),
        Embedding(nn.Embedding(TARGET_SIZE, DIM)),
        encoder=Encoder([block(kind) for _ in range(LAYERS)], nn.LayerNorm(DIM)),
        decoder=Decoder([block(kind, memory=True) for _ in range(LAYERS)], nn.LayerNorm(DIM)),
        output=nn.Linear(DIM, TARGET_SIZE),
    ).double()
    for ours, other in ((model.encoder, theirs.encoder), (model.decoder, theirs.decoder)):
        for mine, his in zip(ours.blocks, other.layers, strict=True):
            copied_block(mine, his)
        ours.norm.load_state_dict(other.norm.state_dict())
    source, lengths, target = batch()
    padded = source == 0
    expected = theirs.train()(
        model.source_embedding(source),
        model.target_embedding(target),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(TARGET, dtype=torch.float64),
        src_key_padding_mask=torch.zeros(padded.shape, dtype=torch.float64).masked_fill(padded, float("-inf")),
        memory_key_padding_mask=torch.zeros(padded.shape, dtype=torch.float64).masked_fill(padded, float("-inf")),
    )
    torch.testing.assert_close(model.features(source, lengths, target), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model(source, lengths, target), model.output(expected), rtol=1e-10, atol=1e-10)


def forced(model, source, lengths, target, step):
    memory = model.encode(source, lengths)
    state, seen = model.start(memory), []
    for tokens in target.unbind(1):
        seen.append(getattr(model, step)(tokens, state, memory))
        state = seen[-1].state
    return seen


@by_settings
@torch.no_grad()
def test_a_step_at_a_time_is_all_steps_at_once(options):
    model, example = transformer(**options), batch()
    logits = model(*example)
    torch.testing.assert_close(torch.stack([one.logits for one in forced(model, *example, "step")], 1), logits)
    steps = forced(model, *example, "observe_step")
    torch.testing.assert_close(torch.stack([one.logits for one in steps], 1), logits)
    weights = model.attention_weights(*example)
    assert weights.shape == (BATCH, TARGET, LAYERS, HEADS, SOURCE)
    torch.testing.assert_close(torch.stack([one.weights for one in steps], 1), weights)
    lens = Weights()
    seen = model.observe(*example, lens)
    torch.testing.assert_close(seen.logits, logits)
    for number, one in enumerate(steps):
        assert one.self_weights.shape == (BATCH, LAYERS, HEADS, number + 1)
        for layer in range(LAYERS):
            own = seen.decoder[layer].attention[lens][:, :, number, : number + 1]
            torch.testing.assert_close(one.self_weights[:, layer], own)


@torch.no_grad()
def test_any_lens_sees_every_layer():
    model, lens = transformer(), Entropy()
    seen = model.observe(*batch(), lens)
    assert [one.attention[lens].shape for one in seen.encoder] == [(BATCH, HEADS, SOURCE)]
    crossed = [one.cross_attention[lens] for one in seen.decoder if one.cross_attention]
    assert [one.shape for one in crossed] == [(BATCH, HEADS, TARGET)] * LAYERS
    assert crossed[0][2].max() < 1e-6  # a source of one word leaves no choice
    assert crossed[0][0].min() > 0.1


@by_settings
@torch.no_grad()
def test_a_sentence_does_not_see_its_batch_nor_what_stands_in_its_padding(options):
    model, (source, lengths, target) = transformer(**options), batch()
    together = model(source, lengths, target)
    for row, length in enumerate(lengths.tolist()):
        alone = model(source[row : row + 1, :length], lengths[row : row + 1], target[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)
    other = source.masked_fill(source == 0, 5)
    torch.testing.assert_close(model(other, lengths, target), together)


@torch.no_grad()
def test_no_word_sees_the_next():
    model, (source, lengths, target) = transformer(), batch()
    changed = target.clone()
    changed[:, 3:] = 1
    before, after = model(source, lengths, target), model(source, lengths, changed)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


@by_settings
@torch.no_grad()
def test_rows_can_be_chosen_between_steps(options):
    model, (source, lengths, target), rows = transformer(**options), batch(), torch.tensor([2, 0, 0, 1])
    memory = model.encode(source, lengths)
    first = model.step(target[:, 0], model.start(memory), memory)
    plain = model.step(target[:, 1], first.state, memory)
    moved = model.step(target[rows, 1], first.state.reorder(rows), memory.reorder(rows))
    torch.testing.assert_close(moved.logits, plain.logits[rows])
    again = model.step(target[:, 1], first.state, memory)  # the state that was passed in is as it was
    assert torch.equal(again.logits, plain.logits)


@torch.no_grad()
def test_rows_that_are_not_there_are_refused():
    model, (source, lengths, target) = transformer(), batch()
    memory = model.encode(source, lengths)
    for held in (memory, model.step(target[:, 0], model.start(memory), memory).state):
        with pytest.raises(ShapeError, match="rows are in 0..3, but the batch has the size 3: they need to be in 0..2"):
            held.reorder(torch.tensor([0, 3]))


@by_settings
def test_every_parameter_learns(options):
    model = transformer(**options).train()
    model(*batch()).logsumexp(-1).sum().backward()
    # A key's bias adds the same to all scores of a row, which the softmax does not see: its gradient is 0 but for
    # rounding, and where queries and keys are turned it is not.
    without = [
        name
        for name, parameter in model.named_parameters()
        if not name.endswith("key.bias") and (parameter.grad is None or not parameter.grad.any())
    ]
    assert not without


def test_tables_are_shared_as_told():
    def tables(shared, target_size=SOURCE_SIZE):
        model = built(settings(shared_embeddings=shared), target_size)
        return [
            one.data_ptr()
            for one in (model.source_embedding.tokens.weight, model.target_embedding.tokens.weight, model.output.weight)
        ]

    assert len(set(tables("none"))) == 3
    source, target, output = tables("target")
    assert source != target == output
    assert len(set(tables("all"))) == 1
    with pytest.raises(ConfigurationError, match="one table for both sides, but the vocabularies have 19 and 23"):
        tables("all", TARGET_SIZE)


def test_embeddings_are_scaled_and_start_with_a_deviation_of_one():
    model = built(TransformerSettings(dim=256, encoder_layers=1, decoder_layers=1), 1000)
    embedding = Embedding(model.target_embedding.tokens)
    assert embedding(torch.arange(1, 1000)[None]).std().item() == pytest.approx(1.0, abs=0.01)
    assert not embedding(torch.zeros(1, 1, dtype=torch.int64)).any()


@torch.no_grad()
def test_dropout_is_where_the_paper_has_it_and_not_in_evaluation():
    model, example = transformer(dropout=0.5), batch()
    assert torch.equal(model(*example), model(*example))
    model.train()
    assert not torch.allclose(model(*example), model(*example))
    places = [name for name, part in model.named_modules() if isinstance(part, nn.Dropout) and part.p]
    assert sorted({name.split(".")[-2] for name in places}) == [
        *("attention_residual", "cross_residual", "feed_forward_residual", "source_embedding", "target_embedding")
    ]
    assert len(places) == 2 + 2 + 3 * LAYERS


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 3])
def test_every_hypothesis_of_a_search_has_the_weights_of_all_heads(beam):
    model, (source, lengths, _) = transformer(), batch()
    searching = SearchSettings(beam=beam, n_best=beam, max_length_ratio=0.5)
    found = beam_search(model, source, lengths, searching)
    without = beam_search(model, source, lengths, searching, observe=False)
    for row, hypotheses in enumerate(found):
        length = lengths[row : row + 1]
        for one, other in zip(hypotheses, without[row], strict=True):
            assert one.ids == other.ids
            count = len(one.ids) + one.finished
            said = torch.tensor([[2, *one.ids]])[:, :count]
            only = source[row : row + 1, : int(length)]
            weights = model.attention_weights(only, length, said)[0]
            torch.testing.assert_close(one.weights, weights)
            lens = Weights()
            own = [layer.attention[lens][0] for layer in model.observe(only, length, said, lens).decoder]
            torch.testing.assert_close(one.self_weights, torch.stack(own).permute(2, 0, 1, 3))
            assert other.weights.shape == (count, 0, length)
            assert other.self_weights.shape == (count, 0, count)


@torch.no_grad()
def test_a_search_ends_where_learned_positions_end():
    model = transformer(positions={"kind": "learned", "length": 7})
    model.output.weight[3] = 0.0  # END is as good as impossible: the others' logits are large
    model.output.weight.mul_(50.0)
    assert (model.max_source_length, model.max_target_length) == (6, 7)
    found = beam_search(model, torch.tensor([[5, 4, 6, 7]]), torch.tensor([4]), SearchSettings(beam=2))
    assert len(found[0][0].ids) == 7
    assert not found[0][0].finished
    assert transformer().max_target_length is None


def test_positions_beyond_a_learned_table_are_named():
    model = transformer(positions={"kind": "learned", "length": 7})
    source, lengths, target = batch()
    with pytest.raises(ShapeError, match="position 10 lies beyond the table"):
        model(source, lengths, target)


def test_parts_that_make_no_translator_are_refused():
    with pytest.raises(ConfigurationError, match="an encoder has no blocks"):
        Encoder([])
    with pytest.raises(ConfigurationError, match="block 1 of an encoder is a Linear, not a TransformerBlock"):
        Encoder([block(), nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="block 0 of an encoder has cross-attention: make it without"):
        Encoder([block(memory=True)])
    with pytest.raises(ConfigurationError, match="block 0 of a decoder has no cross-attention: make it with"):
        Decoder([block()])
    with pytest.raises(
        ConfigurationError, match=r"would attend to the tokens that it is to predict: .* mask=causal\(\)"
    ):
        Decoder([block(memory=True, mask="none")])
    shared = Embedding(nn.Embedding(SOURCE_SIZE, DIM), Learned(5, DIM))
    with pytest.raises(ConfigurationError, match="max_source_length is 0; it needs at least 1"):
        Transformer(
            shared,
            shared,
            encoder=Encoder([block()]),
            decoder=Decoder([block(memory=True)]),
            output=TiedOutput(shared.tokens),
            max_source_length=0,
        )


def test_batches_that_differ_are_refused():
    source, lengths, target = batch()
    model = transformer()
    for wrong in ((source[:2], lengths, target), (source, lengths[:2], target), (source, lengths, target[0])):
        with pytest.raises(ShapeError, match=r"they need \(batch, source tokens\), \(batch,\) and"):
            model(*wrong)


@pytest.mark.parametrize(
    "rows",
    [
        [0, 0, 1, 1, 2, 2],  # the beams of each sentence
        [2, 2, 2, 0, 0, 0],
        [1, 1, 1],
        [0, 1, 1, 2],  # not equally many of each
        [0, 1, 0, 1],
    ],
)
@by_settings
@torch.no_grad()
def test_rows_that_share_a_source_are_those_of_repeated_ones(options, rows):
    model, (source, lengths, target) = transformer(**options), batch()
    rows = torch.tensor(rows)
    memory, repeated = model.encode(source, lengths).reorder(rows), model.encode(source[rows], lengths[rows])
    state, apart = model.start(memory), model.start(repeated)
    for tokens in target[rows].unbind(1):
        tokens = (tokens + torch.arange(len(rows))) % TARGET_SIZE  # beams differ
        step, seen = model.step(tokens, state, memory), model.observe_step(tokens, state, memory)
        expected = model.observe_step(tokens, apart, repeated)
        torch.testing.assert_close(step.logits, expected.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(seen.logits, expected.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(seen.weights, expected.weights, rtol=0, atol=1e-6)
        torch.testing.assert_close(seen.self_weights, expected.self_weights, rtol=0, atol=1e-6)
        state, apart = step.state, expected.state


def test_beams_share_the_memory_of_their_sentence():
    model, (source, lengths, _) = transformer(), batch()
    memory = model.encode(source, lengths)
    beams = memory.reorder(torch.tensor([0, 0, 1, 1, 2, 2]))
    assert beams.layers is memory.layers
    assert beams.reorder(torch.tensor([1, 0, 2, 3, 5, 4])).layers is memory.layers  # beams change places
    left = beams.reorder(torch.tensor([1, 1, 4, 5]))  # the second sentence has ended
    assert (left.beams, left.lengths.tolist()) == (2, [11, 1])
    assert torch.equal(left.layers[0].keys, memory.layers[0].keys[[0, 2]])
    assert left.reorder(torch.tensor([False, False, True, True])).lengths.tolist() == [1]
    assert left.reorder(torch.zeros(0, dtype=torch.int64)).lengths.tolist() == []
    with pytest.raises(ShapeError, match="rows are in 0..6, but the batch has the size 6"):
        beams.reorder(torch.tensor([0, 6]))
