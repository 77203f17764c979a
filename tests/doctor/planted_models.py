"""How to run each planted mistake: the model that it is in, a batch, what `examine` is told, and codes that name it.

`found(entry, line)` examines a model twice: with that mistake alone, and without it. The mistake counts as found if the
first has a finding that names it and the second has none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from test_planted import MISTAKES, PLANTED, load
from torch import Tensor, nn

from regard.doctor import Examination, examine

LENGTH = 40
CHECK = {
    "RUN101": ("future",),
    "RUN102": ("documents",),
    "RUN103": ("padding", "source"),
    "RUN104": ("padding", "source"),
    "RUN105": ("padding", "source"),
    "RUN106": ("positions",),
    "RUN107": ("batch",),
    "RUN108": ("window",),
    "RUN109": ("mixing",),
    "RUN110": ("rows",),
    "RUN112": ("heads",),
    "RUN115": ("scale",),
    "RUN116": ("rotary",),
    "RUN117": ("sums",),
    "RUN118": ("masks",),
    "RUN119": ("precision",),
    "RUN120": ("cache",),
    "RUN121": ("backends",),
    "RUN123": ("random",),
    "RUN124": ("options",),
    "RUN125": ("state",),
}
"""The checks that can report each code."""


@dataclass(frozen=True)
class PlantedModel:
    """The mistakes of a file that show in one model.

    lines: where they are. codes: any of them names the mistake; 'RUN120: single' is one whose message begins so. build:
    the model, from the module of the file. batch: from the module. settings: of `examine`. beside: lines of mistakes
    of the file that stay in it, where the model does not run with them mended, or the mistake is none. folder,
    mistakes: the set that the file is of.
    """

    file: str
    lines: tuple[int, ...]
    codes: tuple[str, ...]
    build: Callable[[ModuleType], nn.Module]
    batch: Callable[[ModuleType], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[int, ...] = ()
    folder: Path = PLANTED
    mistakes: Sequence[Mapping[str, Any]] = field(default=tuple(MISTAKES), repr=False)


def ids(vocabulary: int, length: int = LENGTH, seed: int = 3) -> Tensor:
    return torch.randint(1, vocabulary, (2, length), generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))


def ones(length: int = LENGTH) -> Tensor:
    return torch.ones(2, length, dtype=torch.bool)


class Attends(nn.Module):
    """A layer around a function of (batch, heads, length, dim) queries, keys and values."""

    def __init__(self, function: Callable[..., Tensor], heads: int = 4, dim: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.heads = function, heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.function(q, k, v).transpose(1, 2).flatten(2)


class Functions(nn.Module):
    """A layer whose parameters are a dictionary, around a function of them and the arguments."""

    def __init__(self, parameters: Mapping[str, Tensor], function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weights, self.function = (
            nn.ParameterDict({name: nn.Parameter(one) for name, one in parameters.items()}),
            function,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weights, x)


class Ring(nn.Module):
    """Attention of three ranks, one after another."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.qkv = function, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        parts = [list(tensor.split(x.shape[1] // 3, 1)) for tensor in self.qkv(x).chunk(3, -1)]
        found = self.function(*parts)
        return found if isinstance(found, Tensor) else torch.cat(found, -2)


class Scores(nn.Module):
    """The scores of the texts that a mask marks, by `CompletionServer.score`."""

    def __init__(self, server: Any) -> None:
        super().__init__()
        self.model, self.server = server.model, server

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        texts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]
        return torch.tensor(self.server.score(texts), dtype=torch.float64)[:, None]


class Layer(nn.Module):
    """A bare attention layer behind embeddings without positions, so that it has a name."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


def llama(name: str | None = None, model: str = "LlamaForCausalLM") -> Callable[[ModuleType], nn.Module]:
    """A tiny model of transformers whose attention is that of the file."""

    def build(module: ModuleType) -> nn.Module:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask, sdpa_mask

        from regard.doctor.tiny_models import tiny_model

        made = tiny_model(model)
        if name is None:
            return made
        if name in ("capped", "plain"):  # the file registers the others itself
            AttentionInterface.register(name, getattr(module, f"{name}_attention"))
            AttentionMaskInterface.register(name, eager_mask if name == "capped" else sdpa_mask)
        return module.use(made, name)

    return build


def language_ids(vocabulary: int = 100) -> Callable[[ModuleType], Any]:
    return lambda module: {"input_ids": ids(vocabulary)}


def documents(module: ModuleType) -> dict[str, Tensor]:
    index = torch.arange(LENGTH).repeat(2, 1)
    return {
        "input_ids": ids(128),
        "position_ids": torch.where(index < 20, index, index - 20),
        "document_ids": (index >= 20).long(),
    }


def collated(module: ModuleType) -> Any:
    trainer = module.FlashLikeTrainer(None, length=20)
    texts = [ids(90, 9, seed).tolist()[0] for seed in range(8)]
    return trainer.collate(texts)


def molecules(module: ModuleType) -> dict[str, Tensor]:
    bonds = torch.randint(0, 5, (2, 12, 12), generator=torch.Generator().manual_seed(0))
    bonds[:, 3] = 0
    return {"kinds": ids(20, 12), "bonds": bonds, "mask": ones(12)}


def lengths(keep: Tensor) -> dict[str, Tensor] | None:
    return {"lengths": keep.sum(1)} if bool(keep[:, 0].all()) else None


def by(name: str, *, drops: bool = False) -> Callable[[Tensor], dict[str, Tensor]]:
    return lambda keep: {name: ~keep if drops else keep}


CAUSAL = {"causal": True}
MODELS = (
    PlantedModel("alibi_model.py", (37,), ("RUN120",), lambda m: m.AlibiModel(), lambda m: ids(100), CAUSAL),
    PlantedModel(
        "bert_style.py",
        (56,),
        ("RUN118",),
        lambda m: m.ModelLike(),
        lambda m: {"input_ids": ids(100)},
        {"causal": False},
    ),
    PlantedModel("bert_style.py", (78,), ("RUN101",), lambda m: m.LMHeadLike(), language_ids(), CAUSAL),
    PlantedModel(
        "chunked_prefill.py",
        (49, 51),
        ("RUN120",),
        lambda m: m.AttentionWithoutMask(),
        lambda m: {"x": numbers(LENGTH, 64), "cache": m.StaticCache(2, 4, 48, 16)},
        CAUSAL,
    ),
    PlantedModel(
        "chunked_prefill.py",
        (63,),
        ("RUN120",),
        lambda m: m.SpeculativeAttention(),
        lambda m: {"x": numbers(LENGTH, 64), "cache": m.StaticCache(2, 4, 48, 16)},
        CAUSAL,
    ),
    PlantedModel(
        "class_hierarchy.py", (38,), ("RUN115",), lambda m: m.DotProduct(32, 4), lambda m: numbers(LENGTH, 32)
    ),
    PlantedModel("class_hierarchy.py", (43,), ("RUN115",), lambda m: m.ByLength(32, 4), lambda m: numbers(LENGTH, 32)),
    PlantedModel(
        "class_hierarchy.py",
        (53,),
        ("RUN101", "RUN110"),
        lambda m: m.Causal(32, 4),
        lambda m: numbers(LENGTH, 32),
        CAUSAL,
    ),
    PlantedModel(
        "class_hierarchy.py", (67,), ("RUN108",), lambda m: m.Windowed(32, 4), lambda m: numbers(LENGTH, 32), CAUSAL
    ),
    PlantedModel(
        "einops_style.py", (32,), ("RUN115",), lambda m: m.Attention(48, dim_head=16), lambda m: numbers(LENGTH, 48)
    ),
    PlantedModel(
        "einops_style.py",
        (45,),
        ("RUN103", "RUN105"),
        lambda m: m.Attention(48, dim_head=16),
        lambda m: {"x": numbers(LENGTH, 48), "mask": ones()},
        {"padding": "mask"},
    ),
    PlantedModel("einops_style.py", (66,), ("RUN117",), lambda m: m.ConvAttention2d(40), lambda m: numbers(40, 6, 6)),
    PlantedModel(
        "flex_patterns.py", (16,), ("RUN101",), lambda m: m.FlexSelfAttention(), lambda m: numbers(LENGTH, 64), CAUSAL
    ),
    PlantedModel(
        "functional_style.py",
        (31,),
        ("RUN101",),
        lambda m: Functions(m.init_attention(32), lambda p, x: m.self_attention(p, x, 4)),
        lambda m: numbers(LENGTH, 32),
        CAUSAL,
    ),
    PlantedModel(
        "functional_style.py",
        (44,),
        ("RUN123",),
        lambda m: Attends(m.manual_attention),
        lambda m: numbers(LENGTH, 32),
    ),
    PlantedModel(
        "graph_attention.py",
        (21,),
        ("RUN103",),
        lambda m: m.BiasedAttention(),
        lambda m: {"atoms": numbers(12, 64), "bonds": molecules(m)["bonds"], "mask": ones(12)},
        {"padding": "mask", "sequence": "atoms"},
    ),
    PlantedModel("graph_attention.py", (33,), ("RUN107",), lambda m: m.GraphTransformer(), molecules),
    PlantedModel("graph_attention.py", (45,), ("RUN115",), lambda m: m.GraphTransformer(), molecules),
    PlantedModel("graph_attention.py", (46,), ("RUN110",), lambda m: m.GraphTransformer(), molecules),
    PlantedModel(
        "hf_interface.py", (15,), ("RUN103",), llama("counted"), language_ids(), {"checks": ["padding", "future"]}
    ),
    PlantedModel(
        "hf_interface.py",
        (27,),
        ("RUN121",),
        llama("capped", "Gemma2ForCausalLM"),
        language_ids(),
        {"checks": ["backends"]},
    ),
    PlantedModel(
        "hf_interface.py", (45,), ("RUN103",), llama("plain"), language_ids(), {"checks": ["padding", "future"]}
    ),
    PlantedModel(
        "inference_server.py",
        (37, 51),
        ("RUN120",),
        lambda m: m.ServedModel(),
        lambda m: {"ids": ids(256), "session": m.Session()},
        {"cache": "session", **CAUSAL},
    ),
    PlantedModel(
        "inference_server.py",
        (78,),
        ("RUN104", "RUN105"),
        lambda m: Scores(m.CompletionServer(m.ServedModel())),
        lambda m: {"input_ids": ids(256), "attention_mask": torch.ones(2, LENGTH, dtype=torch.long)},
    ),
    PlantedModel(
        "jit_friendly.py",
        (23,),
        ("RUN115",),
        lambda m: Attends(
            lambda q, k, v: m.attend_unscaled(
                q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), m.causal_bias(q.shape[2], q.dtype)
            ).unflatten(0, q.shape[:2])
        ),
        lambda m: numbers(LENGTH, 32),
        CAUSAL,
    ),
    PlantedModel(
        "jit_friendly.py",
        (54,),
        ("RUN103", "RUN107"),
        lambda m: m.PaddedAttention(),
        lambda m: {"x": numbers(LENGTH, 64)},
        {"padding": by("padding", drops=True), **CAUSAL},
    ),
    PlantedModel(
        "jit_friendly.py", (62,), ("RUN101",), lambda m: m.UnfoldedTwice(), lambda m: numbers(LENGTH, 64), CAUSAL
    ),
    PlantedModel("kv_cache_loop.py", (29,), ("RUN120",), lambda m: m.Decoder(), lambda m: ids(64), CAUSAL),
    PlantedModel(
        "kv_cache_loop.py",
        (45,),
        ("RUN120",),
        lambda m: m.WindowCacheAttention(),
        lambda m: numbers(LENGTH, 64),
        CAUSAL,
    ),
    PlantedModel(
        "kv_cache_loop.py",
        (50,),
        ("RUN120: single tokens",),
        lambda m: m.WindowCacheAttention(),
        lambda m: numbers(LENGTH, 64),
        CAUSAL,
        (45,),
    ),
    PlantedModel(
        "lightning_translator.py",
        (44, 48, 51),
        (),
        lambda m: m.Translator(),
        lambda m: {"src": ids(200, 24), "tgt": ids(200, seed=4)},
        {"pad_token": 0, **CAUSAL},
    ),
    PlantedModel(
        "lightning_translator.py",
        (35,),
        ("RUN107",),
        lambda m: m.Translator(),
        lambda m: {"src": ids(200), "tgt": ids(200, seed=4)},
        {"pad_token": 0, **CAUSAL},
        (48, 51),
    ),
    PlantedModel(
        "manual_or_fused.py",
        (26, 33),
        ("RUN124",),
        lambda m: m.FlexibleAttention(),
        lambda m: numbers(LENGTH, 64),
        CAUSAL,
    ),
    PlantedModel(
        "manual_or_fused.py",
        (45,),
        ("RUN125",),
        lambda m: m.EvalSwitch(m.FlexibleAttention(dropout=0.1)),
        lambda m: numbers(LENGTH, 64),
        CAUSAL,
    ),
    PlantedModel(
        "mha_migration.py", (20,), ("RUN110",), lambda m: m.TextClassifier(), lambda m: ids(1000), {"pad_token": 0}
    ),
    PlantedModel(
        "mha_migration.py", (33,), ("RUN101",), lambda m: m.CausalLayer(), lambda m: numbers(LENGTH, 64), CAUSAL
    ),
    PlantedModel(
        "mha_migration.py", (50,), ("RUN101",), lambda m: m.CausalLayerNew(), lambda m: numbers(LENGTH, 64), CAUSAL
    ),
    PlantedModel("mha_migration.py", (72,), ("RUN107",), lambda m: m.SetEncoder(), lambda m: numbers(12, 64)),
    PlantedModel(
        "mixed_precision.py",
        (26,),
        ("RUN119",),
        lambda m: m.HalfAttention(),
        lambda m: {"x": numbers(LENGTH, 64), "padding": ~ones()},
    ),
    PlantedModel(
        "modeling_tinyllama.py", (115,), ("RUN118",), lambda m: m.TinyForCausalLM(m.TinyConfig()), language_ids(128)
    ),
    PlantedModel(
        "modeling_tinyllama.py",
        (124,),
        ("RUN104",),
        lambda m: m.TinyForCausalLM(m.TinyConfig()),
        language_ids(128),
        {},
        (39,),  # exact rotary positions are relative: padding does not change them
    ),
    PlantedModel("nano_gpt_block.py", (37,), ("RUN123",), lambda m: m.GPT(), lambda m: ids(65), CAUSAL),
    PlantedModel("packed_training.py", (31,), ("RUN102",), lambda m: m.PackedModel(), documents, CAUSAL),
    PlantedModel(
        "packed_training.py",
        (41,),
        ("RUN101", "RUN102"),
        lambda m: m.PackedModel(attention=m.MaskedPackedAttention),
        documents,
        CAUSAL,
    ),
    PlantedModel("packed_training.py", (79,), ("RUN102",), llama(), collated, {"checks": ["documents"]}),
    PlantedModel(
        "policy_transformer.py",
        (24,),
        ("RUN115",),
        lambda m: m.MaskedCausalAttention(32, 40, 8, 0.1),
        lambda m: numbers(LENGTH, 32),
        CAUSAL,
    ),
    PlantedModel(
        "policy_transformer.py",
        (29,),
        ("RUN101",),
        lambda m: m.MaskedCausalAttention(32, 40, 4, 0.1),
        lambda m: numbers(LENGTH, 32),
        CAUSAL,
    ),
    PlantedModel(
        "policy_transformer.py",
        (57,),
        ("RUN101",),
        lambda m: m.Policy(),
        lambda m: {
            "timesteps": torch.arange(LENGTH).repeat(2, 1),
            "states": numbers(LENGTH, 4),
            "actions": numbers(LENGTH, 2, seed=4),
            "returns": numbers(LENGTH, 1, seed=5),
        },
        {"sequence": "actions", "predicts_own": True, **CAUSAL},
    ),
    PlantedModel(
        "policy_transformer.py",
        (71,),
        ("RUN112", "RUN115"),
        lambda m: m.RecurrentMemory(),
        lambda m: numbers(LENGTH, 32),
    ),
    PlantedModel(
        "reading_comprehension.py",
        (24,),
        ("RUN123",),
        lambda m: m.Reader(),
        lambda m: {"passage": ids(200), "question": ids(200, 12)},
        {"sequence": "passage"},
    ),
    PlantedModel(
        "reading_comprehension.py",
        (46,),
        ("RUN103",),
        lambda m: m.SelfMatching(32),
        lambda m: {"x": numbers(LENGTH, 32), "mask": ones()},
        {"padding": "mask"},
    ),
    PlantedModel(
        "reading_comprehension.py",
        (57,),
        ("RUN117",),
        lambda m: m.AnswerPointer(32),
        lambda m: {"x": numbers(LENGTH, 32), "mask": ones()},
        {"padding": "mask"},
    ),
    PlantedModel(
        "recommender.py",
        (37,),
        ("RUN101",),
        lambda m: m.NextClick(),
        lambda m: {"log_seqs": ids(500), "pos_seqs": ids(500, seed=4), "neg_seqs": ids(500, seed=5)},
        {"sequence": "log_seqs", **CAUSAL},
    ),
    PlantedModel(
        "recommender.py",
        (57,),
        ("RUN118",),
        lambda m: m.TargetAttention(),
        lambda m: {"candidate": numbers(32), "history": numbers(LENGTH, 32), "mask": ones()},
        {"sequence": "history", "padding": "mask"},
    ),
    PlantedModel(
        "recommender.py",
        (70,),
        ("RUN103",),
        lambda m: m.BasketAttention(),
        lambda m: {"x": numbers(LENGTH, 32), "present": ones()},
        {"padding": "present"},
    ),
    PlantedModel(
        "research_tricks.py",
        (25,),
        ("RUN101",),
        lambda m: m.BlockSummaryAttention(),
        lambda m: numbers(LENGTH, 64),
        CAUSAL,
    ),
    PlantedModel(
        "research_tricks.py", (42,), ("RUN115",), lambda m: m.TalkingHeads(), lambda m: numbers(LENGTH, 64), CAUSAL
    ),
    PlantedModel(
        "research_tricks.py",
        (77,),
        ("RUN103", "RUN105"),
        lambda m: m.GatedPool(),
        lambda m: {"x": numbers(LENGTH, 64), "lengths": torch.full((2,), LENGTH)},
        {"padding": lengths},
    ),
    PlantedModel(
        "ring_helpers.py", (22,), ("RUN101",), lambda m: Ring(m.ring_attention), lambda m: numbers(36, 16), CAUSAL
    ),
    PlantedModel(
        "ring_helpers.py", (24,), ("RUN110",), lambda m: Ring(m.ring_attention), lambda m: numbers(36, 16), CAUSAL
    ),
    PlantedModel(
        "ring_helpers.py", (51,), ("RUN115",), lambda m: Ring(m.ulysses_attention), lambda m: numbers(36, 16), CAUSAL
    ),
    PlantedModel(
        "rotary_variants.py",
        (33,),
        ("RUN116",),
        lambda m: Layer(m.RotaryAttention(rotary=m.InterleavedRotary)),
        lambda m: numbers(LENGTH, 64),
        CAUSAL,
    ),
    PlantedModel(
        "rotary_variants.py",
        (63,),
        ("RUN106",),
        lambda m: Layer(m.RotaryAttention()),
        lambda m: numbers(LENGTH, 64),
        CAUSAL,
    ),
    PlantedModel(
        "rotary_variants.py",
        (72,),
        ("RUN116",),
        lambda m: Layer(m.RotaryEverywhere()),
        lambda m: numbers(LENGTH, 64),
        CAUSAL,
    ),
    PlantedModel(
        "rotary_variants.py", (85,), ("RUN120",), lambda m: m.RotaryCached(), lambda m: numbers(LENGTH, 64), CAUSAL
    ),
    PlantedModel(
        "speech_encoder.py",
        (56,),
        ("RUN110",),
        lambda m: m.StreamingEncoder(),
        lambda m: {"audio": numbers(LENGTH, 80), "lengths": torch.full((2,), LENGTH)},
    ),
    PlantedModel(
        "speech_encoder.py",
        (80,),
        ("RUN115",),
        lambda m: m.RelativeShift(),
        lambda m: {"x": numbers(LENGTH, 64), "positions": numbers(2 * LENGTH - 1, 64, seed=4)},
        {"sequence": "x"},
    ),
    PlantedModel(
        "student_seq2seq.py",
        (30, 77, 107),
        (),
        lambda m: m.Transformer(),
        lambda m: {"src": ids(50, 24), "trg": ids(50, seed=4)},
        {"pad_token": 0, **CAUSAL},
    ),
    PlantedModel("swin_windows.py", (53,), ("RUN118",), lambda m: m.ShiftedBlock(), lambda m: numbers(8, 8, 32)),
    PlantedModel("swin_windows.py", (58,), ("RUN108",), lambda m: m.ShiftedBlock(), lambda m: numbers(8, 8, 32)),
    PlantedModel("swin_windows.py", (78,), ("RUN109",), lambda m: m.AxialAttention(), lambda m: numbers(8, 8, 32)),
    PlantedModel("textbook_decoder.py", (12,), ("RUN115",), lambda m: m.Decoder(), lambda m: ids(100), CAUSAL),
    PlantedModel("textbook_decoder.py", (37,), ("RUN101",), lambda m: m.Decoder(), lambda m: ids(100), CAUSAL),
    PlantedModel("textbook_decoder.py", (79,), ("RUN106",), lambda m: m.Decoder(), lambda m: ids(100), CAUSAL),
    PlantedModel("time_series.py", (20,), ("RUN106",), lambda m: m.Forecaster(), lambda m: numbers(LENGTH, 7)),
    PlantedModel("time_series.py", (39,), ("RUN110",), lambda m: m.NextHour(), lambda m: numbers(LENGTH, 7), CAUSAL),
    PlantedModel(
        "time_series.py",
        (64,),
        ("RUN115",),
        lambda m: m.ProbAttention(),
        lambda m: tuple(numbers(LENGTH, 4, 8, seed=seed) for seed in range(3)),
        CAUSAL,
    ),
    PlantedModel("train_script.py", (28,), ("RUN115",), lambda m: m.Bigger(65, 64, 4, 64), lambda m: ids(65), CAUSAL),
    PlantedModel(
        "vision_language.py",
        (20,),
        ("RUN101",),
        lambda m: m.Captioner(),
        lambda m: {"tokens": ids(100), "patches": numbers(16, 48)},
        {"sequence": "tokens", **CAUSAL},
    ),
    PlantedModel(
        "vision_language.py",
        (25,),
        ("RUN103",),
        lambda m: m.CrossAttention(),
        lambda m: {"x": numbers(LENGTH, 64), "context": numbers(16, 48), "context_mask": ones(16)},
        {"sequence": "x"},
    ),
    PlantedModel("vit_block.py", (37,), ("RUN117",), lambda m: m.ViT(), lambda m: numbers(3, 16, 16)),
    PlantedModel("vit_block.py", (57,), ("RUN117",), lambda m: m.ViT(), lambda m: numbers(3, 16, 16)),
)
"""One entry for each model that can be built; a mistake may need several."""
OF_LINES: dict[tuple[str, int], tuple[str, ...]] = {
    ("lightning_translator.py", 44): ("RUN110",),
    ("lightning_translator.py", 48): ("RUN101",),
    ("lightning_translator.py", 51): ("RUN105",),
    ("student_seq2seq.py", 30): ("RUN115",),
    ("student_seq2seq.py", 77): ("RUN105",),
    ("student_seq2seq.py", 107): ("RUN101",),
}
"""Codes of mistakes that share a model and are of different kinds."""


def planted_source(entry: PlantedModel, lines: tuple[int, ...]) -> str:
    """The file with the mistakes on these lines, and every other one mended."""
    source = (entry.folder / entry.file).read_text()
    for mistake in entry.mistakes:
        if mistake["file"] == entry.file and mistake["line"] not in lines:
            for old, new in mistake.get("mended", []):
                assert source.count(old) == 1, (mistake, old)
                source = source.replace(old, new)
    return source


def codes_of(entry: PlantedModel, line: int) -> tuple[str, ...]:
    return OF_LINES.get((entry.file, line), entry.codes)


def examined(entry: PlantedModel, line: int, lines: tuple[int, ...]) -> Examination:
    """The model with the mistakes on these lines, examined by the checks that can name the one on `line`.

    What it compiles runs as it is: Inductor's FlexAttention of the CPU (torch 2.13) sometimes gives another output for
    the same input, by more than half of the largest.
    """
    module = load(planted_source(entry, lines), entry.file)
    torch.manual_seed(0)
    checks = [check for code in codes_of(entry, line) for check in CHECK[code[:6]]]
    settings = {**entry.settings, "checks": dict.fromkeys(checks)}
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return examine(entry.build(module), entry.batch(module), **settings)


def named(entry: PlantedModel, line: int, examination: Examination) -> bool:
    """Whether a finding names the mistake."""
    found = [f"{one.code}: {one.message}" for one in examination.findings]
    return any(one.startswith(code) for one in found for code in codes_of(entry, line))
