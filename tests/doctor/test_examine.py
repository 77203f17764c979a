"""`regard.doctor.examine`: leaks planted in a small model, one at a time, and the model without them."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.doctor import CHECKS, Examination, examine
from regard.doctor.subject import Subject
from regard.errors import ConfigurationError

LENGTH = 40


@dataclass
class Plant:
    """What is wrong with a model; by default nothing."""

    future: str = ""
    padding: str = ""
    positions: bool = True
    documents: bool = True
    cache: str = ""
    dropout: bool = False
    train: bool = False
    batch: bool = False
    head: str = ""
    window: int | None = None


class Layer(nn.Module):
    def __init__(self, plant: Plant, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.plant, self.heads = plant, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def keep(self, n: int, total: int, padding: Tensor | None, documents: Tensor | None) -> Tensor:
        plant = self.plant
        rows, columns = torch.arange(total - n, total)[:, None], torch.arange(total)
        keep = columns <= rows + (plant.future == "next")
        if plant.future == "block":
            keep = columns // 8 <= rows // 8
        if plant.cache == "aligned left":
            keep = columns <= rows - (total - n)
        if plant.cache == "chunks" and 1 < n < total:
            keep = torch.ones(n, total, dtype=torch.bool)
        if plant.window is not None:
            keep = keep & (columns > rows - plant.window)
        if padding is not None and plant.padding != "ignored":
            keep = keep & padding[:, None, None, :].bool()
        if documents is not None and plant.documents:
            keep = keep & (documents[:, None, :, None] == documents[:, None, None, :])
        return keep

    def forward(
        self, x: Tensor, padding: Tensor | None, documents: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        keep = self.keep(n, k.shape[2], padding, documents)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.plant.head == "saturated":
            scores = scores * torch.tensor([1, 1, 1e7, 1]).to(scores)[:, None, None]
        if self.plant.head == "dead":
            scores = scores * torch.tensor([1, 0, 1, 1]).to(scores)[:, None, None]
        if self.plant.head == "duplicate":
            scores = scores[:, [0, 1, 2, 0]]
        if self.plant.head == "sink":
            first = torch.zeros(4, 1, k.shape[2])
            first[3, :, 0] = 50
            scores = scores + first.to(scores)
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if self.plant.dropout:
            weights = functional.dropout(weights, 0.1)
        if self.plant.train and self.training:
            weights = weights**2
        out = weights @ v
        if self.plant.batch:
            out = out - 0.1 * out.mean(0, keepdim=True)
        return self.out(out.transpose(1, 2).reshape(b, n, d)), (k, v)


class Small(nn.Module):
    """A language model with a cache, a padding mask, document ids and positions of the tokens that exist."""

    def __init__(self, plant: Plant) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plant = plant
        self.embedding, self.position = nn.Embedding(50, 32), nn.Embedding(200, 32)
        self.layers = nn.ModuleList([Layer(plant), Layer(plant)])
        self.head = nn.Linear(32, 50)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        start = 0 if cache is None or self.plant.cache == "positions" else cache[0][0].shape[2]
        positions = torch.arange(start, start + ids.shape[1]).expand_as(ids)
        if attention_mask is not None and self.plant.padding != "positions":
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        if document_ids is not None:
            same = document_ids[:, :, None] == document_ids[:, None, :]
            positions = same.tril(-1).sum(-1)
        x = self.embedding(ids)
        if self.plant.positions:
            x = x + self.position(positions)
        caches = []
        for number, layer in enumerate(self.layers):
            y, new = layer(
                functional.layer_norm(x, (32,)), attention_mask, document_ids, cache[number] if cache else None
            )
            x = x + y
            caches.append(new)
        return self.head(x), caches


def batch(rows: int = 2, length: int = LENGTH, high: int = 50) -> Tensor:
    return torch.randint(high, (rows, length), generator=torch.Generator().manual_seed(3))


def found(plant: Plant, **settings: object) -> Examination:
    return examine(Small(plant), batch(), causal=True, **settings)  # type: ignore[arg-type]


def test_nothing_is_found_in_a_clean_model() -> None:
    examination = found(Plant())
    assert examination.findings == ()
    assert set(examination.skipped) == {"source", "backends", "eager"}
    assert set(examination.checked) | set(examination.skipped) == set(CHECKS)


@pytest.mark.parametrize(
    ("plant", "code"),
    [
        (Plant(future="next"), "RUN101 RUN120"),  # with a cache there are no later tokens yet
        (Plant(future="block"), "RUN101 RUN104 RUN120"),
        (Plant(documents=False), "RUN102"),
        (Plant(padding="ignored"), "RUN103"),
        (Plant(padding="positions"), "RUN104"),
        (Plant(positions=False), "RUN106"),
        (Plant(batch=True), "RUN103 RUN107"),
        (Plant(head="saturated"), "RUN111"),
        (Plant(head="dead"), "RUN112"),
        (Plant(head="duplicate"), "RUN113"),
        (Plant(head="sink"), "RUN104 RUN114"),
        (Plant(cache="aligned left"), "RUN120"),
        (Plant(cache="chunks"), "RUN120"),
        (Plant(cache="positions"), "RUN120"),
        (Plant(train=True), "RUN122"),
        (Plant(dropout=True), "RUN123"),
        (Plant(window=8), "RUN130"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_fault_is_found_and_no_other_but_its_consequences(plant: Plant, code: str) -> None:
    assert found(plant).codes == set(code.split())


def test_a_leak_is_located() -> None:
    [leak] = found(Plant(future="next"), checks=["future"]).findings
    evidence = leak.evidence
    assert (evidence.changed, evidence.moved) == (2, 0)  # over two layers
    assert evidence.by is not None
    assert evidence.tolerance is not None
    assert evidence.by > 1e6 * evidence.tolerance
    assert evidence.module == "layers.0"
    assert evidence.file == __file__
    assert evidence.line == Layer.forward.__code__.co_firstlineno
    assert "outputs before position 1, 3, 7" in leak.message


def test_a_leak_within_blocks_is_found_at_their_borders_alone() -> None:
    [leak] = found(Plant(future="block"), checks=["future"]).findings
    assert leak.message == "outputs before position 1, 3, 7, 15, 31 depend on tokens from there on"


def test_left_padding_is_mended_by_positions() -> None:
    [moved] = found(Plant(padding="positions"), checks=["padding"]).findings
    assert "5 tokens of masked padding on the left" in moved.message


def test_an_encoder_is_not_blamed_for_seeing_the_future() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    examination = examine(encoder, x)
    assert examination.codes == {"RUN106"}  # it has no positions
    assert "as in an encoder" in examination.skipped["future"]
    assert "RUN101" in examine(encoder, x, causal=True).codes


def test_rows_that_attend_to_nothing_are_found() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=torch.ones(x.shape[1], x.shape[1]).tril(-1).bool()
            )

    examination = examine(Empty(), torch.randn(2, 20, 8), causal=True, checks=["rows"])
    assert examination.codes == {"RUN110"}
    assert examination.findings[-1].evidence.moved == 0
    assert examination.findings[-1].evidence.file == __file__


def test_layers_of_regard_and_torch_are_seen() -> None:
    from regard.doctor.softmax_capture import capture_weights

    x = torch.randn(2, 12, 16)
    layers = {
        "regard": regard.nn.MultiheadAttention(16, 2, batch_first=True),
        "multihead": nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(),
    }
    for kind, layer in layers.items():
        [one] = capture_weights(Subject(layer, (x, x, x) if kind == "regard" else x))
        assert one.kind == kind
        assert one.weights.shape == (2, 2, 12, 12)
        assert torch.allclose(one.weights.sum(-1), torch.ones(2, 2, 12), atol=1e-5)


def test_a_model_stays_as_it_was() -> None:
    model = Small(Plant()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    examine(model, batch())
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_text_and_json() -> None:
    examination = found(Plant(future="next"), checks=["future", "source"])
    text = str(examination)
    assert text.startswith("Small: 1 finding, 1 checks, 1 skipped\n  RUN101 error: future leak: ")
    assert f"at {Path(__file__)}:" in text
    [leak] = json.loads(examination.to_json())["findings"]
    assert (leak["code"], leak["severity"], leak["evidence"]["moved"]) == ("RUN101", "error", 0)


@pytest.mark.parametrize(
    ("model", "given", "settings", "message"),
    [
        (
            nn.Linear(3, 3),
            torch.zeros(2, 4, 5),
            {},
            r"Linear does not run on the batch \(0: \(2, 4, 5\)\): ",
        ),
        (nn.Flatten(0), torch.zeros(2, 4, 5), {}, "needed is a floating-point tensor with an output for each position"),
        (nn.Flatten(1), torch.zeros(2, 4, 5), {}, "no input has the positions of the output"),
        (nn.Linear(5, 3), torch.zeros(2, 1, 5), {}, "the sequence has 1 position; two or more"),
        (nn.Linear(5, 3), torch.zeros(2, 4, 5), {"checks": ["past"]}, "there is no check 'past': random, future"),
        (nn.Linear(5, 3), torch.zeros(2, 4, 5), {"sequence": "x"}, "the batch has no tensor 'x', it has 0"),
        (len, torch.zeros(2, 4, 5), {}, "a model is a torch.nn.Module, not builtin_function_or_method"),
    ],
)
def test_bad_input(model: nn.Module, given: Tensor, settings: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        examine(model, given, **settings)
