"""M2M100, NLLB, mBART, T5, mT5 and MADLAD as transformers saves them: ids, logits and searches equal to its own."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from marian_folders import SENTENCES
from multilingual_folders import generation_options, write_translator
from run_commands import regard
from safetensors.torch import load_file, save_file
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from regard.errors import CheckpointError, ConfigurationError, CorpusError, VocabularyError
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator
from regard_command.options import languages_of

KINDS = ["m2m", "nllb", "nllb_legacy", "mbart", "mbart50", "t5", "mt5", "madlad"]
MARK = {"madlad": "<2fr> "}


def encoded(tokenizer, kind, lines):
    ids = [tokenizer(MARK.get(kind, "") + line).input_ids for line in lines]
    lengths = torch.tensor([len(one) for one in ids])
    rows = [torch.tensor(one) for one in ids]
    source = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return source, lengths, (torch.arange(source.shape[1]) < lengths[:, None]).long()


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, *write_translator(folder, request.param)


def read(kind, folder):
    return Translator.from_huggingface(folder, (None, "fr") if kind == "madlad" else (None, None))


def test_ids_are_those_of_transformers(saved):
    kind, folder, _, tokenizer = saved
    vocabulary = read(kind, folder).source_vocabulary
    for line in [*SENTENCES, "Jumps, zebra!  Çela 42%", "x" * 40]:
        assert vocabulary.encode(line) == tokenizer(MARK.get(kind, "") + line).input_ids


def logits_of(kind, folder, model, tokenizer):
    """Logits of a whole target, of it step by step, and those of transformers, each in single and double precision."""
    translator = read(kind, folder)
    source, lengths, mask = encoded(tokenizer, kind, SENTENCES[:3])
    begin = torch.full((3, 1), translator.target_vocabulary.special.begin)
    said = torch.randint(4, model.config.vocab_size, (3, 13), generator=torch.Generator().manual_seed(3))
    target = torch.cat([begin, said], dim=1)
    ours, theirs = translator.model, copy.deepcopy(model)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            ours.to(dtype), theirs.to(dtype)  # type: ignore[attr-defined]
            expected = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
            memory = ours.encode(source, lengths)
            state, steps = ours.start(memory), []
            for tokens in target.unbind(1):
                step = ours.step(tokens, state, memory)
                state = step.state
                steps.append(step.logits)
            yield ours(source, lengths, target), torch.stack(steps, 1), expected  # type: ignore[operator]


def exact_norm(norm, x):
    """The RMS norm of T5, whose variance transformers takes in float32 whatever the model computes in."""
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def check_logits(*saved):
    """Within 1e-5 of the largest logit in float32, and in float64 within 1e-5: M2M100's table of sines is in float32.

    T5 has no table, and agrees to one rounding of float32 once its norm is computed in float64: that of the gain of the
    last norm, which has the factor of the output in it. Where single precision moves transformers' own logits farther
    from those in double precision, the budget in float32 is three times that distance: the trainer of the tokenizer
    gives another vocabulary in each run, and in 42 of them the quotient of the two errors was 0.5 to 1.7.
    """
    has_table = saved[0] not in ("t5", "mt5", "madlad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T5LayerNorm, "forward", exact_norm)
        patch.setattr(MT5LayerNorm, "forward", exact_norm)
        single, double = logits_of(*saved)
        largest = float(double[2].abs().max())
        assert 0.5 < largest < 40
        rounding = float((single[2] - double[2]).abs().max())
        budgets = max(1e-5 * max(1.0, largest), 3 * rounding), 1e-5 if has_table else 2**-24 * largest
        for (whole, steps, _), budget in zip((single, double), budgets, strict=True):
            torch.testing.assert_close(whole.double(), double[2], rtol=0, atol=budget)
            torch.testing.assert_close(steps.double(), double[2], rtol=0, atol=budget)
            assert budget < 2e-4


def test_logits_are_those_of_transformers(saved):
    check_logits(*saved)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("m2m", {"activation_function": "silu", "scale_embedding": False, "decoder_layers": 1}),
        ("m2m", {"tie_word_embeddings": False}),
        ("mbart50", {"scale_embedding": True, "activation_function": "relu", "encoder_attention_heads": 2}),
        ("t5", {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
        ("t5", {"feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 8, "num_decoder_layers": None}),
        ("mt5", {"feed_forward_proj": "relu", "relative_attention_max_distance": 20}),
    ],
)
def test_settings_change_what_they_change_there(tmp_path, kind, changes):
    model, tokenizer = write_translator(tmp_path, kind, **changes)
    check_logits(kind, tmp_path, model, tokenizer)


SEARCHES = [
    {"num_beams": 1},
    {"num_beams": 4},
    {"num_beams": 4, "early_stopping": True, "num_return_sequences": 3},
    {"num_beams": 3, "length_penalty": 0.6, "max_length": 40, "forced_eos_token_id": None},
]


def biased(model, end_bias):
    """The model with more or fewer ends: a bias of the output, or of the last norm where there is none."""
    end = model.config.eos_token_id
    if "final_logits_bias" in dict(model.named_buffers()):
        model.final_logits_bias[0, end] = end_bias
    else:
        with torch.no_grad():
            model.get_output_embeddings().weight[end] *= end_bias / 3
    return model


@pytest.mark.parametrize(("kind", "generation"), [*itertools.product(KINDS, SEARCHES)])
@pytest.mark.parametrize("end_bias", [0.3, 4.0, 9.0])
@pytest.mark.covering
def test_searches_say_the_tokens_of_transformers(tmp_path, kind, generation, end_bias):
    # A tied output of random numbers would say one token again and again.
    model, tokenizer = write_translator(tmp_path, kind, generation=generation, tie_word_embeddings=False)
    model = biased(model, end_bias)
    model.save_pretrained(tmp_path)
    source, _, mask = encoded(tokenizer, kind, SENTENCES[:5])
    options = generation_options(kind, tokenizer)
    with torch.no_grad():
        expected = model.generate(input_ids=source, attention_mask=mask, **options)  # type: ignore[attr-defined]
    count, translator = generation.get("num_return_sequences", 1), read(kind, tmp_path)
    end = translator.target_vocabulary.special.end
    for row, translation in enumerate(translator.translate(SENTENCES[:5])):
        assert len(translation.candidates) == count
        for rank, candidate in enumerate(translation.candidates):
            ids = expected[count * row + rank, 1:].tolist()
            ids = ids[: ids.index(end)] if end in ids else ids
            said = list(candidate.tokens[: len(candidate.tokens) - candidate.finished])
            assert said == translator.target_vocabulary.tokens(ids)
            if "<unk>" not in candidate.text:  # which transformers leaves out
                text = re.sub(r"__[a-z]+?__|<2\w+>", "", tokenizer.decode(ids, skip_special_tokens=True))
                assert candidate.text.split() == text.split()


def test_pieces_join_to_words_and_a_target_begins_with_its_language(saved):
    kind, folder, _, _ = saved
    translator = read(kind, folder)
    line = "The quick brown fox, I am tired."
    ids = translator.source_vocabulary.encode(line)
    words = translator.source_vocabulary.words(ids)
    joined = ["" for _ in line.split()]
    for word, piece in zip(words, translator.source_vocabulary.tokens(ids), strict=True):
        if word >= 0:
            joined[word] += piece
    assert joined == ["▁" + word for word in line.split()]
    assert translator.source_vocabulary.decode(ids) == line
    pair = translator.align([SENTENCES[0]], [SENTENCES[1]])[0]
    assert {target for _, target in pair.links} == set(range(len(SENTENCES[1].split())))
    assert all(source < len(SENTENCES[0].split()) for source, _ in pair.links)


def test_a_folder_without_languages_is_told_them(tmp_path):
    write_translator(tmp_path, "nllb")
    path = tmp_path / "tokenizer_config.json"
    given = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**given, "src_lang": None, "tgt_lang": None}), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"source language is not named, and this model has 202: name both as"):
        Translator.from_huggingface(tmp_path)
    with pytest.raises(ConfigurationError, match="the target language is not named"):
        Translator.from_huggingface(tmp_path, ("deu_Latn", None))
    vocabulary = Translator.from_huggingface(tmp_path, ("deu_Latn", "kor_Hang")).source_vocabulary
    assert vocabulary.tokens(vocabulary.encode("The dog."))[0] == "deu_Latn"
    for wrong, near in (("kor_Hong", "'kor_Hang'"), ("kor", r"'kor_Hang'\?"), ("KOR_HANG", r"'kor_Hang'\?")):
        with pytest.raises(ConfigurationError, match=f"no language '{wrong}' in this model: did you mean {near}"):
            Translator.from_huggingface(tmp_path, ("deu_Latn", wrong))
    # The folder may force it, as models that were fine-tuned for one direction do.
    settings = json.loads((tmp_path / "generation_config.json").read_text("utf-8"))
    korean = vocabulary._ids["kor_Hang"]  # type: ignore[attr-defined]
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "forced_bos_token_id": korean}))
    assert Translator.from_huggingface(tmp_path, ("deu_Latn", None)).target_vocabulary.special.first == korean


def test_a_language_of_a_model_that_is_told_none(tmp_path):
    write_translator(tmp_path / "t5", "t5")
    with pytest.raises(ConfigurationError, match="there is no language 'fr' in this model: its tokenizer has none"):
        Translator.from_huggingface(tmp_path / "t5", (None, "fr"))
    with pytest.raises(ConfigurationError, match="this model is told no source language, and 'en' is named"):
        Translator.from_huggingface(tmp_path / "t5", ("en", None))
    with pytest.raises(ConfigurationError, match="is a run of regard, which translates between two languages"):
        Translator.load(ENGLISH_FRENCH, languages=("en", "fr"))
    (tmp_path / "t5" / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"has no experiment.yaml.*or Marian saved, with config.json or decoder.yml"
    ):
        Translator.load(tmp_path / "t5", languages=("en", "fr"))


def test_madlad_takes_the_language_of_each_line(tmp_path):
    write_translator(tmp_path, "madlad")
    told, own = Translator.from_huggingface(tmp_path, (None, "fr")), Translator.from_huggingface(tmp_path)
    assert own.source_vocabulary.encode("<2fr> The dog.") == told.source_vocabulary.encode("The dog.")
    assert own.source_vocabulary.language("<2de> The dog.") == "<2de>"
    with pytest.raises(VocabularyError, match="begins with <2fq>, which is no language of this model; did you mean"):
        own.source_vocabulary.encode("<2fq> The dog.")


def test_a_source_beyond_the_positions_is_refused(tmp_path):
    write_translator(tmp_path / "mbart", "mbart50")
    write_translator(tmp_path / "t5", "t5", generation={"max_length": None})
    with pytest.raises(CorpusError, match="line 1 has .* tokens and this model allows 48"):
        Translator.from_huggingface(tmp_path / "mbart").translate(["the dog " * 40])
    endless = Translator.from_huggingface(tmp_path / "t5")
    translation = endless.translate(["the dog " * 20])[0]
    assert len(translation.candidates[0].tokens) <= 2 * len(translation.source_tokens) + 10


def changed(folder: Path, file: str, **values):
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **values}), encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "file", "values", "message"),
    [
        ("m2m", "config.json", {"activation_function": "gelu_new"}, "activation_function='gelu_new'"),
        ("m2m", "config.json", {"d_model": 30}, "d_model=30"),
        ("m2m", "config.json", {"vocab_size": 50}, "vocab.json has ids up to .*, and the model has 50"),
        ("m2m", "config.json", {"vocab_size": 100}, "vocab.json, with its languages, has ids up to"),
        ("m2m", "tokenizer_config.json", {"language_codes": "mine"}, "m2m100 and wmt21 are known"),
        ("nllb", "config.json", {"decoder_layers": 3}, "decoder.layers.2"),
        ("nllb", "config.json", {"vocab_size": 150}, "tokenizer.json has ids up to .*, and the model has 150"),
        ("nllb", "generation_config.json", {"no_repeat_ngram_size": 5}, "no_repeat_ngram_size=5"),
        ("nllb", "generation_config.json", {"decoder_start_token_id": 9999}, "has the id 9999 for begin"),
        ("mbart", "config.json", {"max_position_embeddings": 64}, r"embed_positions.weight: the file has \[48, 32\]"),
        ("mbart", "tokenizer_config.json", {"tokenizer_class": None}, "MBartTokenizer or MBart50Tokenizer tells where"),
        ("t5", "config.json", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh'"),
        ("t5", "config.json", {"dense_act_fn": "gelu"}, "dense_act_fn='gelu'"),
        ("t5", "config.json", {"num_heads": 2}, "SelfAttention.k.weight"),
        ("t5", "config.json", {"layer_norm_epsilon": "small"}, "layer_norm_epsilon='small'"),
        ("t5", "config.json", {"model_type": "umt5"}, "model_type='umt5', which is no translator .*did you mean 'mt5'"),
        ("t5", "config.json", {"new_scores": 2}, "new_scores=2"),
        ("t5", "tokenizer_config.json", {"unk_token": "?"}, "unk_token='\\?'"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, kind, file, values, message):
    write_translator(tmp_path, kind)
    changed(tmp_path, file, **values)
    with pytest.raises((CheckpointError, VocabularyError), match=message):
        Translator.from_huggingface(tmp_path)


def test_tokenizers_that_are_not_whole(tmp_path):
    write_translator(tmp_path / "t5", "t5")
    path = tmp_path / "t5" / "tokenizer.json"
    whole = path.read_text("utf-8")
    path.write_text(whole.replace('"Metaspace"', '"Metaspaces"'), encoding="utf-8")
    with pytest.raises(VocabularyError, match="is truncated or no file of the tokenizers library"):
        Translator.from_huggingface(tmp_path / "t5")
    path.write_text(json.dumps({**json.loads(whole), "pre_tokenizer": {"type": "Whitespace"}}), encoding="utf-8")
    with pytest.raises(VocabularyError, match="cuts text by Unigram and its words begin at 'a'; Unigram and BPE are"):
        Translator.from_huggingface(tmp_path / "t5")
    path.unlink()
    with pytest.raises(
        VocabularyError, match="there is no tokenizer.json in .*save_pretrained.folder. of transformers"
    ):
        Translator.from_huggingface(tmp_path / "t5")
    write_translator(tmp_path / "m2m", "m2m")
    (tmp_path / "m2m" / "sentencepiece.bpe.model").unlink()
    with pytest.raises(VocabularyError, match="cannot read the SentencePiece model .*sentencepiece.bpe.model"):
        Translator.from_huggingface(tmp_path / "m2m")


def test_weights_of_several_dtypes_are_named(tmp_path):
    write_translator(tmp_path, "t5")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    half = {name: tensor if name.endswith("wo.weight") else tensor.half() for name, tensor in tensors.items()}
    save_file(half, path, metadata={"format": "pt"})  # as transformers keeps it
    loaded = Translator.from_huggingface(tmp_path).model
    weight = loaded.encoder.blocks[0].attention.projections.query.weight  # type: ignore[attr-defined]
    assert torch.equal(weight, half["encoder.block.0.layer.0.SelfAttention.q.weight"].float())
    mixed = {name: tensor.bfloat16() if "SelfAttention.q" in name else tensor for name, tensor in tensors.items()}
    save_file(mixed, path, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"several dtypes, .* in float32 and .*SelfAttention.q.weight in bfloat16"
    ):
        Translator.from_huggingface(tmp_path)
    eight = {name: tensor.to(torch.int8) if "wo." in name else tensor for name, tensor in tensors.items()}
    save_file(eight, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="is torch.int8: weights need floating-point numbers of 16 bits or more"):
        Translator.from_huggingface(tmp_path)


def test_every_command_takes_the_folder_and_its_languages(saved, tmp_path):
    kind, folder, _, _ = saved
    languages = {"madlad": ["--languages", ":fr"], "m2m": ["--languages", "en:de"]}.get(kind, [])
    where = ["--checkpoint", folder, *languages]
    translator = Translator.from_huggingface(folder, languages_of(languages[1] if languages else None))
    said = regard("translate", *where, *SENTENCES[:2]).stdout.splitlines()
    assert said == [one.text for one in translator.translate(SENTENCES[:2])]
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("".join(f"{line}\n" for line in SENTENCES[:3]), encoding="utf-8")
    target.write_text("".join(f"{line}\n" for line in SENTENCES[1:4]), encoding="utf-8")
    files = ["--source", source, "--target", target]
    assert "BLEU" in regard("test", *where, *files, "--output", tmp_path / "said").stdout
    assert len(regard("align", *where, *files).stdout.splitlines()) == 3
    page = tmp_path / "page.html"
    regard("explore", "--translate", *where, "--html", page, SENTENCES[0])
    assert "quick" in page.read_text("utf-8")
    for attention in ("cross", "self", "encoder"):
        shown = regard("steps", "I am not.", *where, "--kind", attention, "--format", "json")
        tables = {table["key"]: table for table in json.loads(shown.stdout)["tables"]}
        assert "prediction" in tables


def test_languages_on_the_command_line(tmp_path):
    write_translator(tmp_path, "nllb")
    message = regard("translate", "--checkpoint", tmp_path, "--languages", "eng_Latn", "Hi.", code=2).stderr
    assert "--languages 'eng_Latn' needs a colon between source and target" in message
    files = ["--source", tmp_path / "config.json", "--target", tmp_path / "config.json"]
    message = regard("align", "--checkpoint", tmp_path, "--languages", "eng_Latn:fra", *files, code=2).stderr
    assert "there is no language 'fra' in this model: did you mean 'fra_Latn'" in message
    message = regard("translate", "--languages", "en:fr", "Hi.", code=2).stderr
    assert "is a run of regard, which translates between two languages" in message
    message = regard("explore", "--languages", "en:fr", "an.atlas", code=2).stderr
    assert "--languages chooses those of a translator" in message
