"""A language model learns: a sentence by heart, and packed texts as it learns separate ones."""

import pytest
import torch
from torch.nn import functional

from regard import masks
from regard.errors import ShapeError
from regard.models.language_model import ExpertsConfig, GatedExpertsConfig, GatedFeedForwardConfig, next_token_loss

SENTENCE = b"Pack my box with five dozen liquor jugs, then look away."


FEED_FORWARDS = {
    "gated": GatedFeedForwardConfig(48),
    "experts": ExpertsConfig(24, 4, 2),
    "shared expert": GatedExpertsConfig(24, 4, 2, normalized=False, shared_dim=16),
}


@pytest.mark.parametrize("feed_forward", FEED_FORWARDS.values(), ids=FEED_FORWARDS.keys())
def test_a_sentence_is_learnt_by_heart(feed_forward, make):
    model = make(vocabulary_size=128, feed_forward=feed_forward).train()
    tokens = torch.tensor([list(SENTENCE)])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss = next_token_loss(model(tokens), tokens)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.05
    written = torch.cat(list(model.eval().generate(tokens[:, :4], len(SENTENCE) - 4)))
    assert SENTENCE[:4] + bytes(written.tolist()) == SENTENCE


def test_packed_documents_train_as_separate_ones(make):
    model = make().double()
    texts = [torch.randint(0, 61, (1, length)) for length in (5, 9, 2)]
    ids = torch.cat([torch.full((1, text.shape[1]), number) for number, text in enumerate(texts)], 1)
    packed = torch.cat(texts, 1)
    counted = torch.ones_like(packed, dtype=torch.bool)
    counted[:, 1:] = ids[:, 1:] == ids[:, :-1]
    parameters = list(model.parameters())
    together = next_token_loss(model(packed, mask=masks.causal() & masks.documents(ids)), packed, counted)
    found = torch.autograd.grad(together, parameters)
    losses = [next_token_loss(model(text), text) * (text.shape[1] - 1) for text in texts]
    alone = torch.stack(losses).sum() / 13
    expected = torch.autograd.grad(alone, parameters)
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


def test_padding_does_not_count(make):
    model, tokens = make().double(), torch.randint(0, 61, (2, 9))
    counted = torch.arange(9) < torch.tensor([[9], [4]])
    loss = next_token_loss(model(tokens, mask=masks.padding(lengths=torch.tensor([9, 4]))), tokens, counted)
    rows = [next_token_loss(model(tokens[:1]), tokens[:1]), next_token_loss(model(tokens[1:, :4]), tokens[1:, :4])]
    torch.testing.assert_close(loss, (rows[0] * 8 + rows[1] * 3) / 11)


def test_the_loss_is_torch_cross_entropy():
    logits, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])
    torch.testing.assert_close(next_token_loss(logits, tokens), expected)
    assert next_token_loss(logits.bfloat16(), tokens).dtype == torch.float32
    assert next_token_loss(logits.double(), tokens).dtype == torch.float64


def test_what_has_no_loss():
    logits, tokens = torch.zeros(2, 5, 7), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"logits have the shape \(2, 5, 7\), tokens \(2, 4\); they need"):
        next_token_loss(logits, tokens[:, :4])
    with pytest.raises(ShapeError, match=r"and counted \(2, 4\)"):
        next_token_loss(logits, tokens, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ShapeError, match="no token is counted"):
        next_token_loss(logits[:, :1], tokens[:, :1])
    with pytest.raises(ShapeError, match="no token is counted"):
        next_token_loss(logits, tokens, torch.zeros(2, 5, dtype=torch.bool))
