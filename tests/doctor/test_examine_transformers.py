"""`regard.doctor.examine` on models of transformers, and the zoo."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

from regard.doctor import examine
from regard.doctor.model_source import load_model, random_batch
from regard.errors import ConfigurationError

pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.masking_utils import sdpa_mask

from regard.doctor.tiny_models import class_names, tiny_model
from regard.doctor.zoo import examine_zoo, left_by_swap
from regard.doctor.zoo_report import ZooEntry, ZooReport
from regard.huggingface.attention_function import SUPPORTED_KEYWORDS, UNSUPPORTED_KEYWORDS

CHECKED = ("future", "padding", "batch", "rows", "cache", "training", "random")


def leaky_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: object
) -> tuple[Tensor, None]:
    """Attention of every token to all tokens."""
    y = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return y.transpose(1, 2).contiguous(), None


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return tiny_model("LlamaForCausalLM")  # type: ignore[return-value]


@pytest.fixture
def leaky(llama: LlamaForCausalLM) -> Iterator[LlamaForCausalLM]:
    AttentionInterface.register("leaky", leaky_attention)
    AttentionMaskInterface.register("leaky", sdpa_mask)
    llama.config._attn_implementation = "leaky"
    yield llama
    AttentionInterface._global_mapping.pop("leaky")
    AttentionMaskInterface._global_mapping.pop("leaky")


def test_nothing_is_found_in_llama(llama: LlamaForCausalLM) -> None:
    examination = examine(llama, random_batch(llama, 2, 40))
    assert examination.findings == ()
    assert set(examination.skipped) == {"documents", "source", "eager"}


def test_swap_mends_an_attention_without_mask(leaky: LlamaForCausalLM) -> None:
    examination = examine(leaky, random_batch(leaky, 2, 20), checks=CHECKED)
    assert {"RUN101", "RUN103", "RUN120"} <= examination.codes
    assert all(found.mended_by_swap for found in examination.findings)
    [future] = [found for found in examination.findings if found.code == "RUN101"]
    assert future.evidence.module == "model.layers.0.self_attn"
    assert str(future.evidence.file).endswith("modeling_llama.py")
    assert "regard.huggingface.swap mends it" in str(examination)


def test_documents_packed_by_positions_leak_under_a_mask_of_ones(llama: LlamaForCausalLM) -> None:
    [leak] = examine(llama, random_batch(llama, 2, 40), packed=True, checks=["documents"]).findings
    assert (leak.code, leak.name) == ("RUN102", "document leak")
    assert "with a mask of ones" in leak.message
    assert leak.evidence.moved is not None
    assert leak.evidence.moved >= 20


def test_an_encoder_decoder_is_examined() -> None:
    model = tiny_model("BartForConditionalGeneration")
    batch = random_batch(model, 2, 20)
    assert set(batch) == {"input_ids", "decoder_input_ids"}
    examination = examine(model, batch, checks=["future", "source", "batch"])
    assert {"future", "source", "batch"} == set(examination.checked)
    assert "RUN101" not in examination.codes


def test_eager_attention_is_a_hint_with_its_time(llama: LlamaForCausalLM) -> None:
    llama.set_attn_implementation("eager")
    examination = examine(llama, random_batch(llama, 2, 20), checks=["eager"])
    for found in examination.findings:  # where another way is faster here
        assert (found.code, found.severity.value) == ("RUN131", "hint")
    assert "eager" in examination.checked


def test_names_of_classes() -> None:
    names = class_names()
    assert len(names) > 190
    assert {"LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"} <= set(names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuchForCausalLM", "transformers has no model class 'NoSuchForCausalLM'"),
        ("no/such folder", "is neither a folder, nor a class of transformers, nor FILE.py:NAME"),
        ("nowhere.py:Model", "there is no file nowhere.py"),
    ],
)
def test_models_that_cannot_be_loaded(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_model(name)


def test_the_zoo_examines_classes_in_processes_writes_a_table_and_resumes_from_its_folder(tmp_path: Path) -> None:
    lines: list[str] = []
    report = examine_zoo(only="GPT2LMHeadModel", workers=1, seconds=280, folder=tmp_path, on_done=lines.append)
    assert lines == [f"1/1 GPT2LMHeadModel ({report.entries[0].seconds:.1f} s): RUN102, RUN104"]
    assert report.counts()["left padding"] == (1, 0, 1)
    assert "| GPT2LMHeadModel |  |  | ✗ |  | ✗ |  |" in report.markdown()
    assert (
        "| left padding | masked padding on the left changes the outputs of tokens | 1 | 1 | 0 |" in report.markdown()
    )
    assert "RUN104 left padding changes results" in report.markdown()
    assert "1 of 1 classes examined" in report.summary()

    assert [path.name for path in tmp_path.iterdir()] == ["GPT2LMHeadModel.json"]
    again = examine_zoo(only="GPT2LMHeadModel", workers=1, seconds=280, folder=tmp_path, on_done=lines.append)
    assert len(lines) == 1
    assert again.entries == report.entries
    (tmp_path / "GPT2LMHeadModel.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"GPT2LMHeadModel.json is not the result of a class of the zoo"):
        examine_zoo(only="GPT2LMHeadModel", workers=1, seconds=280, folder=tmp_path)


def test_a_class_that_takes_too_long_is_given_up() -> None:
    [entry] = examine_zoo(only="GPT2LMHeadModel", workers=1, seconds=0.01).entries
    assert "0.01 s" in str(entry.failure)


def test_classes_that_do_not_run_are_listed_with_the_reason() -> None:
    report = ZooReport((ZooEntry("XForCausalLM", None, "X has no tiny configuration: KeyError: 'y'", 1.0),), "5", 1.0)
    assert "- XForCausalLM: X has no tiny configuration" in report.markdown()
    with pytest.raises(ConfigurationError, match="nothing to examine: 0 classes"):
        examine_zoo(only="nothing has this in its name")


def test_a_model_whose_attention_regard_refuses_is_examined_all_the_same() -> None:
    model = tiny_model("DeepseekV32ForCausalLM")  # keys selected by an indexer
    examination = examine(model, random_batch(model, 2, 24), packed=True, checks=("documents", "backends"))
    assert examination.codes == {"RUN102"}
    assert not any(found.mended_by_swap for found in examination.findings)


def test_the_rounding_of_a_recurrence_in_float32_is_no_finding() -> None:
    model = tiny_model("Qwen3_5ForCausalLM")
    assert examine(model, random_batch(model, 2, 72), checks=("padding",)).findings == ()


def test_a_model_that_regard_refuses_although_it_was_swapped_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SUPPORTED_KEYWORDS - {"indices"}  # as if they were a keyword that nobody has heard of
    monkeypatch.setattr(sys.modules["regard.huggingface.attention_function"], "SUPPORTED_KEYWORDS", known)
    model = tiny_model("GlmMoeDsaForCausalLM")
    examination = examine(model, random_batch(model, 2, 24), checks=("backends",))
    [found] = examination.findings
    assert found.code == "RUN121"
    assert "'regard' raises ConfigurationError: GlmMoeDsaAttention gives its attention indices=" in found.message
    assert found.message.endswith("where 'eager' runs")


def test_the_zoo_says_what_swap_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = UNSUPPORTED_KEYWORDS | {"indices": "keys that an indexer selects"}
    monkeypatch.setattr(sys.modules["regard.huggingface.register"], "UNSUPPORTED_KEYWORDS", refused)
    left = left_by_swap(tiny_model("GlmMoeDsaForCausalLM"))
    [(reason, count)] = left.items()
    assert count == 2
    assert "GlmMoeDsaAttention passes indices (keys that an indexer selects), unknown to 'regard'" in reason
    assert left_by_swap(tiny_model("LlamaForCausalLM")) == {}
    examination = {"findings": [], "checked": [], "left": left}
    report = ZooReport((ZooEntry("GlmMoeDsaForCausalLM", examination, None, 1.0),), "5", 1.0)
    assert f"- GlmMoeDsaForCausalLM, 2 modules: {reason}" in report.markdown()
