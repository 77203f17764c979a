"""`regard.doctor.examine`: leaks planted in a small model, one at a time, and the model without them."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.doctor import CHECKS, Examination, Severity, examine
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
    assert set(examination.skipped) == {"source", "backends", "eager", "rotary"}
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


def test_one_row_becomes_two_where_the_model_takes_them() -> None:
    examination = examine(Small(Plant(batch=True)), batch(rows=1), causal=True, checks=["batch"])
    assert examination.codes == {"RUN107"}

    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(1).reshape(1, 20, 4)

    assert examine(One(), torch.randn(1, 20, 4), checks=["batch"]).skipped == {"batch": "the batch has one row"}


def test_a_leak_within_blocks_is_found_at_their_borders_alone() -> None:
    [leak] = found(Plant(future="block"), checks=["future"]).findings
    assert leak.message == "outputs before position 1, 3, 7, 15, 31 depend on tokens from there on"


def test_left_padding_is_mended_by_positions() -> None:
    [moved] = found(Plant(padding="positions"), checks=["padding"]).findings
    assert "masked padding on the left changes results" in moved.message


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
        subject = Subject(layer, (x, x, x) if kind == "regard" else x)
        subject.maps = True
        [one] = capture_weights(subject)
        assert one.kind == kind
        assert one.weights is not None
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


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


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
        (Transposed(), torch.zeros(2, 4, 5), {}, r"no input has the rows of the output \(4, 2, 5\): 0: \(2, 4, 5\)"),
        (nn.Linear(5, 3), torch.zeros(2, 1, 5), {}, "the sequence has 1 position; two or more"),
        (nn.Linear(5, 3), torch.zeros(0, 4, 5), {}, r"the sequence \(0, 4, 5\) is empty; two positions are needed"),
        (
            nn.Linear(5, 3, device="meta"),
            torch.zeros(2, 4, 5, device="meta"),
            {},
            "Linear is on the meta device, without",
        ),
        (nn.Linear(5, 3), torch.zeros(2, 4, 5), {"checks": ["past"]}, "there is no check 'past': random, future"),
        (nn.Linear(5, 3), torch.zeros(2, 4, 5), {"sequence": "x"}, "the batch has no tensor 'x', it has 0"),
        (len, torch.zeros(2, 4, 5), {}, "a model is a torch.nn.Module, not builtin_function_or_method"),
    ],
)
def test_bad_input(model: nn.Module, given: Tensor, settings: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        examine(model, given, **settings)


def test_outputs_of_rows_are_examined() -> None:
    class Classifier(nn.Module):
        def __init__(self, kept: bool) -> None:
            super().__init__()
            self.kept, self.score, self.out = kept, nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            outside = torch.arange(x.shape[1]) >= lengths[:, None]
            scores = self.score(x).squeeze(-1)
            weights = (scores.masked_fill(outside, -torch.inf) if self.kept else scores).softmax(-1)
            return self.out((weights[..., None] * x).sum(1))

    given = {"x": torch.randn(2, 20, 8), "lengths": torch.full((2,), 20)}

    def padding(keep: Tensor) -> dict[str, Tensor] | None:
        return {"lengths": keep.sum(1)} if bool(keep[:, 0].all()) else None

    for kept, codes in ((True, set()), (False, {"RUN103"})):
        examination = examine(Classifier(kept), given, padding=padding, checks=["padding", "future", "batch"])
        assert examination.codes == codes
        assert "one output for each row" in examination.skipped["future"]


def test_a_cache_in_the_batch_is_not_changed() -> None:
    class Session:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    class Mean(nn.Module):
        def __init__(self, right: bool) -> None:
            super().__init__()
            self.right, self.out = right, nn.Linear(8, 8)

        def forward(self, x: Tensor, session: Session) -> Tensor:
            before = torch.cat(session.seen, 1) if session.seen and self.right else x[:, :0]
            session.seen.append(x)
            whole = torch.cat([before, x], 1)
            counts = torch.arange(1, whole.shape[1] + 1)[:, None]
            return self.out(whole.cumsum(1) / counts)[:, before.shape[1] :]

    for right, codes in ((True, set()), (False, {"RUN120"})):
        session = Session()
        given = {"x": torch.randn(2, 20, 8), "session": session}
        assert examine(Mean(right), given, causal=True, cache="session", checks=["cache"]).codes == codes
        assert session.seen == []


def test_a_model_of_nan_is_reported_once() -> None:
    model = Small(Plant())
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    examination = examine(model, batch(), causal=True)
    assert [(one.code, one.message) for one in examination.findings] == [
        ("RUN110", "outputs are NaN, first in row 0 of the batch")
    ]
    assert examination.skipped["future"] == "all outputs are NaN"


def test_masks_of_float64_are_not_blamed() -> None:
    """The smallest number of float64 is -inf in a softmax of float32: findings in float64 alone are none."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            least = torch.finfo(x.dtype).min
            scores = q @ k.mT / 8**0.5 + torch.full((x.shape[1],) * 2, least, dtype=x.dtype).triu(1)
            if attention_mask is not None:
                scores = scores.masked_fill(attention_mask[:, None] == 0, least)
            return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v

    x = torch.randn(2, 20, 8)
    assert examine(Masked(), {"x": x}, causal=True, checks=["padding", "rows"]).codes == set()


@pytest.mark.parametrize(
    ("factor", "codes"), [(8**-0.5, set()), (1.0, {"RUN115"}), (1 / 8, {"RUN115"}), (16**-0.5, {"RUN115"})]
)
def test_scales_are_followed_through_rotations_and_masks(factor: float, codes: set[str]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            angle = torch.arange(x.shape[1])[:, None] * torch.ones(8)
            q, k = (t * angle.cos() + torch.cat([-t[..., 4:], t[..., :4]], -1) * angle.sin() for t in (q * factor, k))
            scores = torch.einsum("bhid,bhjd->bhij", q, k)
            scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
            return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    assert examine(Scaled(), torch.randn(2, 20, 16), causal=True, checks=["scale", "sums"]).codes == codes


@pytest.mark.parametrize("kind", ["causal", "bool", "float", "grouped", "nothing"])
def test_weights_of_sdpa_are_the_formula(kind: str) -> None:
    from regard.doctor.softmax_capture import capture_weights

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            self.q, self.k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            settings = {
                "causal": {"is_causal": True},
                "bool": {"attn_mask": past, "scale": 0.3},
                "float": {"attn_mask": torch.zeros(past.shape).masked_fill(~past, torch.finfo(x.dtype).min)},
                "grouped": {"is_causal": True, "enable_gqa": True},
                "nothing": {"attn_mask": past.tril(-1)},
            }[kind]
            heads = slice(2) if kind == "grouped" else slice(None)
            y = functional.scaled_dot_product_attention(self.q, self.k[:, heads], v[:, heads], **settings)
            return y.transpose(1, 2).flatten(2)

    model = Attends()
    subject = Subject(model, torch.randn(2, 12, 16))
    subject.maps = True
    [one] = capture_weights(subject, compares_heads=True)
    assert one.weights is not None
    keys = model.k[:, :2].repeat_interleave(2, 1) if kind == "grouped" else model.k
    past = torch.ones(12, 12, dtype=torch.bool).tril(-1 if kind == "nothing" else 0)
    scores = (model.q @ keys.mT * (0.3 if kind == "bool" else 0.5)).masked_fill(~past, -torch.inf)
    assert one.kind == "sdpa"
    assert torch.allclose(one.weights, scores.softmax(-1).nan_to_num(), atol=1e-6)
    assert bool((one.visible == past).all())
    assert torch.equal(one.visible_keys, past.sum(-1).expand(2, 4, 12))
    assert torch.equal(one.top, one.weights.amax(-1))
    assert torch.equal(one.first, one.weights[..., 0])
    uniform = past / past.sum(-1, keepdim=True).clamp(min=1)
    assert torch.allclose(one.off_uniform, (one.weights - uniform).abs().amax(-1))
    assert one.apart is not None
    assert torch.allclose(one.apart[1, 3], (one.weights[:, 1] - one.weights[:, 3]).abs().max())


@pytest.mark.parametrize("kind", ["sdpa", "softmax"])
def test_weights_of_long_sequences_are_stored_by_cells(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.doctor import finding_map, softmax_capture

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            if kind == "sdpa":
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            weights = (q @ k.mT / 2).masked_fill(future, -torch.inf).softmax(-1)
            return (weights @ v).transpose(1, 2).flatten(2)

    subject = Subject(Attends(), torch.randn(2, 50, 8))
    subject.maps = True
    [exact] = softmax_capture.capture_weights(subject, compares_heads=True)
    monkeypatch.setattr(softmax_capture, "CELLS", 7)
    monkeypatch.setattr(softmax_capture, "MOST_READ", 2000)
    [pooled] = softmax_capture.capture_weights(subject, compares_heads=True)
    assert exact.weights is not None
    assert pooled.weights is not None
    assert (exact.cell, pooled.cell) == ((1, 1), (8, 8))
    padded = functional.pad(exact.weights, (0, 6, 0, 6)).unflatten(3, (7, 8)).unflatten(2, (7, 8))
    assert torch.allclose(pooled.weights, padded.amax((3, 5)), atol=1e-6)
    for name in ("visible_keys", "top", "first", "off_uniform", "apart"):
        assert torch.allclose(getattr(exact, name), getattr(pooled, name), atol=1e-6), name
    [shown] = finding_map.attention_map(subject, pooled, 1, (41, 9))
    assert (shown.values.shape, shown.at, shown.place) == ((2, 7, 7), (41, 9), (5, 1))
    assert "the largest of 8 queries and 8 keys each" in shown.title


class Translator(nn.Module):
    """A right encoder-decoder of torch's modules, with masks for the padding of both sides."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 32), nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)
        self.body = nn.Transformer(32, 4, 2, 2, 64, batch_first=True, custom_encoder=encoder)
        self.out = nn.Linear(32, 50)

    def forward(self, src, tgt, src_key_padding_mask, tgt_key_padding_mask):
        source, target = (self.embed(one) + self.place(torch.arange(one.size(1))) for one in (src, tgt))
        future = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool).triu(1)
        hidden = self.body(
            source,
            target,
            tgt_mask=future,
            src_key_padding_mask=src_key_padding_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=src_key_padding_mask,
        )
        return self.out(hidden)


@pytest.fixture(scope="module")
def translated():
    torch.manual_seed(0)
    padding = torch.zeros(2, 20, dtype=torch.bool)
    batch = {"src": torch.randint(1, 50, (2, 20)), "tgt": torch.randint(1, 50, (2, 20))}
    batch |= {"src_key_padding_mask": padding, "tgt_key_padding_mask": padding}
    return examine(Translator(), batch, causal=True, sequence="tgt")


def test_a_source_as_long_as_the_target_stays_whole_where_the_target_is_cut(translated):
    assert not translated.codes & {"RUN103", "RUN105"}


def test_padding_on_the_left_is_an_error_of_models_that_generate_alone(translated):
    assert {one.severity for one in translated.findings if one.code == "RUN104"} == {Severity.WARNING}


def test_what_was_skipped_is_one_line(translated):
    (line,) = [line for line in str(translated).splitlines() if "skipped:" in line]
    assert line.strip() == f"skipped: {', '.join(translated.skipped)}"
    assert len(translated.skipped) > 3


class Subsampled(nn.Module):
    """An encoder of speech: one output for two frames."""

    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, frames):
        return self.body(frames.unflatten(1, (-1, 2)).mean(2))


def test_outputs_of_other_positions_are_called_so():
    found = examine(Subsampled(), torch.randn(2, 20, 16))
    assert found.skipped["mixing"] == "the model has 10 outputs for 20 positions"
    assert not any("row" in why for why in found.skipped.values())


def test_a_block_without_an_embedding_may_get_its_positions_from_outside():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    (found,) = examine(layer, torch.randn(2, 20, 16), causal=False, checks=["positions"]).findings
    assert (found.code, found.severity) == ("RUN106", Severity.HINT)


def test_a_class_for_words_in_any_order_is_a_warning():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layer = nn.Embedding(50, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, ids):
            return self.layer(self.words(ids)).mean(1)

    (found,) = examine(Bag(), batch(), checks=["positions"]).findings
    assert (found.code, found.severity) == ("RUN106", Severity.WARNING)


@pytest.mark.parametrize(("window", "codes"), [(4, set()), (3, {"RUN108"})])
def test_a_window_of_a_picture_has_its_square_of_tokens(window: int, codes: set[str]) -> None:
    class Window(nn.TransformerEncoderLayer):
        def __init__(self):
            super().__init__(16, 2, 32, batch_first=True)
            self.window = window

    assert examine(Window(), torch.randn(2, 16, 16), causal=False, checks=["window"]).codes == codes
