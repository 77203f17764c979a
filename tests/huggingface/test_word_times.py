"""Word times equal those of transformers' own code; words are those of the text."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard.errors import ConfigurationError, ShapeError
from regard.huggingface import time_warping, word_times
from regard.huggingface.transcript_words import TranscriptReader

pytest.importorskip("transformers")
from transformers import GenerationMixin, WhisperConfig, WhisperForConditionalGeneration, WhisperTokenizer
from transformers.models.whisper import generation_whisper, tokenization_whisper
from transformers.utils.generic import ModelOutput

END, START, LANGUAGE, TASK, NO_TIMES = range(40, 45)
FIRST_TIME = NO_TIMES + 1
FRAMES = 67
HEADS = [[0, 1], [1, 0], [1, 3], [2, 2]]
SIZES: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "max_source_positions": FRAMES,
    "max_target_positions": 60,
    "init_std": 0.5,
}


def whisper(seed=1, dtype=torch.float64, attention="regard"):
    """A model with random weights; in float64, so that no rounding decides between two paths."""
    regard.huggingface.register()
    torch.manual_seed(seed)
    special: dict[str, Any] = {
        "eos_token_id": END,
        "pad_token_id": END,
        "bos_token_id": END,
        "decoder_start_token_id": START,
    }
    config = WhisperConfig(vocab_size=FIRST_TIME + FRAMES + 1, **SIZES, **special)
    made: Any = WhisperForConditionalGeneration._from_config(config, attn_implementation=attention)
    model = made.to(dtype).eval()
    model.generation_config.alignment_heads = HEADS
    model.generation_config.no_timestamps_token_id = NO_TIMES
    model.generation_config.lang_to_id = {"<|ko|>": LANGUAGE}
    return model


class Numbers:
    """Each token is a word."""

    def decode(self, tokens):
        return "".join(f" {token}" for token in tokens)


def theirs(model, features, tokens, prompt, num_frames=None):
    """By transformers: the time of each token of one sequence, from eager weights of all heads of one pass."""
    eager = whisper(attention="eager", dtype=model.dtype)
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        # Their rows are those of generation, in which the last token is not read.
        seen = eager(input_features=features, decoder_input_ids=tokens[:, :-1], output_attentions=True)
    outputs = ModelOutput(cross_attentions=(seen.cross_attentions,), sequences=tokens)
    frames = None if num_frames is None else [num_frames]
    return eager._extract_token_timestamps(outputs, HEADS, num_frames=frames, num_input_ids=prompt)[0].tolist()


def timed_sequence(length, with_times, seed=0):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, END, (length,), generator=generator).tolist()
    if not with_times:
        return [START, LANGUAGE, TASK, NO_TIMES, *text, END], 4
    middle = [FIRST_TIME + 20, FIRST_TIME + 21]
    return [START, LANGUAGE, TASK, FIRST_TIME, *text[:5], *middle, *text[5:], FIRST_TIME + FRAMES, END], 3


@pytest.mark.parametrize("with_times", [True, False])
@pytest.mark.parametrize("num_frames", [None, 2 * FRAMES, 90, 91, 12])
@pytest.mark.parametrize("length", [1, 7, 31])
def test_times_are_those_of_transformers(length, num_frames, with_times):
    """One word behind a prompt without times has two rows of scores, 1 and -1 in each frame: many paths cost the same
    but for rounding, which differs between processors. Two words stand in its place.
    """
    length += length == 1 and not with_times
    model, features = whisper(length), torch.randn(1, 8, 2 * FRAMES, dtype=torch.float64)
    tokens, prompt = timed_sequence(length, with_times)
    (words,) = word_times(
        model, Numbers(), features, torch.tensor([tokens]), num_frames=None if num_frames is None else [num_frames]
    )
    # Where the prompt has no times, their first row is that which predicts the second token: one row more is asked for.
    expected = theirs(model, features, torch.tensor([tokens]), prompt - (not with_times), num_frames)
    text = [at for at in range(prompt, len(tokens)) if tokens[at] < END]
    assert [word.tokens for word in words] == [range(at, at + 1) for at in text]
    np.testing.assert_allclose([word.start for word in words], [expected[at - 1] for at in text], atol=1e-6)
    np.testing.assert_allclose([word.end for word in words], [expected[at] for at in text], atol=1e-6)


def test_times_of_what_transformers_generates():
    """From the weights that it keeps of each step of a generation, with its caches."""
    model, eager = whisper(3), whisper(3, attention="eager")
    features = torch.randn(2, 8, 2 * FRAMES, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    prompt, settings = [START, LANGUAGE, TASK, NO_TIMES], {"max_length": 29, "suppress_tokens": [*range(END, 113)]}
    generate: Any = vars(GenerationMixin)["generate"]  # without Whisper's windows of the audio
    out = generate(
        eager,
        features,
        decoder_input_ids=torch.tensor([prompt] * 2),
        output_attentions=True,
        return_dict_in_generate=True,
        **settings,
    )
    expected = eager._extract_token_timestamps(out, HEADS, num_input_ids=len(prompt) - 1)
    sequences = out.sequences.clone()
    sequences[:, -1] = END  # they have no weights of the token that comes last
    for sent, given in ((sequences, None), (sequences[:, 4:], prompt)):
        found = word_times(model, Numbers(), features, sent, prompt=given)
        assert [len(words) for words in found] == [24, 24]
        for words, times in zip(found, expected.tolist(), strict=True):
            np.testing.assert_allclose([word.start for word in words], times[3:-2], atol=1e-6)
            np.testing.assert_allclose([word.end for word in words], times[4:-1], atol=1e-6)
    assert expected.unique().numel() > 10


def test_a_batch_is_timed_as_its_sequences_alone():
    """Of several lengths: padding is no row, and each has its own number of frames."""
    model = whisper(5)
    features = torch.randn(3, 8, 2 * FRAMES, dtype=torch.float64)
    texts = [timed_sequence(length, with_times=False)[0] for length in (31, 12, 5)]
    padded = torch.tensor([text + [END] * (len(texts[0]) - len(text)) for text in texts])
    frames = torch.tensor([2 * FRAMES, 101, 60])
    together = word_times(model, Numbers(), features, padded, num_frames=frames)
    for at, text in enumerate(texts):
        own = word_times(model, Numbers(), features[at : at + 1], torch.tensor([text]), num_frames=frames[at : at + 1])
        assert own[0] == together[at]
        assert own[0][-1].end <= int(frames[at]) / 100


def test_float32_gives_the_times_of_float64():
    """Of one model, whose paths no rounding changes."""
    model, features = whisper(7), torch.randn(1, 8, 2 * FRAMES, generator=torch.Generator().manual_seed(8))
    tokens = torch.tensor([timed_sequence(31, with_times=True)[0]])
    expected = word_times(model, Numbers(), features.double(), tokens)
    assert word_times(model.float(), Numbers(), features, tokens) == expected


def test_only_the_weights_of_the_chosen_heads_are_computed(monkeypatch):
    """No more than those of one layer's heads in one tensor, and none of the encoder."""
    computed = []

    def counted(self, problem, lse):
        computed.append(tuple(problem.weights_shape))
        return compute(self, problem, lse)

    compute = regard.lenses.Weights.compute
    monkeypatch.setattr(regard.lenses.Weights, "compute", counted)
    tokens, _ = timed_sequence(9, with_times=False)
    word_times(whisper(), Numbers(), torch.randn(1, 8, 2 * FRAMES, dtype=torch.float64), torch.tensor([tokens]))
    assert computed == [(1, 1, 14, FRAMES), (1, 2, 14, FRAMES), (1, 1, 14, FRAMES)]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 13), (13, 1), (5, 3), (37, 53), (131, 67)])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal"])
def test_paths_are_those_of_transformers(sizes, kind):
    generator = np.random.default_rng(sum(sizes))
    cost = {
        "normal": generator.normal(size=sizes),
        "ties": generator.integers(-2, 2, size=sizes).astype(float),
        "equal": np.zeros(sizes),
    }[kind]
    for ours, expected in zip(
        time_warping.warping_path(cost), generation_whisper._dynamic_time_warping(cost), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)


def test_a_path_has_the_lowest_sum_of_all():
    cost = np.random.default_rng(2).normal(size=(4, 5))

    def sums(row, column):
        if (row, column) == (3, 4):
            yield cost[row, column]
        for down, along in ((1, 0), (0, 1), (1, 1)):
            if row + down < 4 and column + along < 5:
                yield from (cost[row, column] + rest for rest in sums(row + down, column + along))

    rows, columns = time_warping.warping_path(cost)
    np.testing.assert_allclose(cost[rows, columns].sum(), min(sums(0, 0)), rtol=1e-6)


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("frames", [1, 3, 4, 53])
def test_medians_are_those_of_transformers(width, frames):
    values = torch.randn(2, 3, frames)
    assert torch.equal(time_warping.median_filter(values, width), generation_whisper._median_filter(values, width))


def test_a_frame_with_equal_weights_says_nothing():
    weights = torch.rand(2, 5, 11, dtype=torch.float64)
    weights[:, :, 4] = 0.25
    scores = time_warping.alignment_scores(weights, 1)
    assert scores.isfinite().all()
    assert torch.equal(scores[:, 4], torch.zeros(5, dtype=torch.float64))
    one = time_warping.alignment_scores(weights[:, :1], 7)  # nothing to be standardized over
    assert torch.equal(one, torch.zeros(1, 11, dtype=torch.float64))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Whisper's own kind of tokenizer: bytes, and pairs of them, of which some are parts of Korean characters."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = list(generation_bytes().values())
    space = generation_bytes()[ord(" ")]
    pairs = [(space, "c"), ("a", "t"), (space + "c", "at"), (space, generation_bytes()[0xEC])]
    vocabulary = {token: at for at, token in enumerate(letters + ["".join(pair) for pair in pairs])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, pairs)) + "\n")
    made = WhisperTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|ja|>", "<|transcribe|>", "<|notimestamps|>"]
    made.add_special_tokens({"additional_special_tokens": special})
    return made


def generation_bytes():
    """By byte, the character that stands for it in a vocabulary of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return {byte: chr(byte if byte in plain else next(others)) for byte in range(256)}


def transcript(tokenizer, text, language="<|en|>"):
    """A reader, the tokens of a whole sequence, and the rows that predict its text."""
    numbers = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|en|>", "<|ja|>", "<|endoftext|>")}
    reader = TranscriptReader(
        tokenizer,
        prompt_start=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        end_of_text=numbers["<|endoftext|>"],
        first_time=tokenizer.convert_tokens_to_ids("<|notimestamps|>") + 1,
        languages={numbers["<|en|>"]: "en", numbers["<|ja|>"]: "ja"},
    )
    tokens = tokenizer("<|startoftranscript|>" + language + "<|transcribe|><|notimestamps|>", add_special_tokens=False)
    tokens = tokens["input_ids"] + tokenizer(text, add_special_tokens=False)["input_ids"] + [numbers["<|endoftext|>"]]
    return reader, tokens, reader.predicting_rows(tokens)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (' The cat, the "cat" (sat).', ["The", "cat,", "the", '"cat"', "(sat)."]),
        (" a well-known cat's hat", ["a", "well-known", "cat's", "hat"]),
        (" 안녕하세요 여러분!", ["안녕하세요", "여러분!"]),
        (" naïve 🙂 cats", ["naïve", "🙂", "cats"]),
        ("cat", ["cat"]),
        ("   ", []),
        ("", []),
    ],
)
def test_words_are_what_stands_between_spaces(tokenizer, text, words):
    reader, tokens, rows = transcript(tokenizer, text)
    found = reader.words(tokens, rows)
    assert [word.text for word in found] == words
    for word, after in itertools.pairwise(found):
        assert word.tokens.stop <= after.tokens.start
    for word in found:
        assert tokenizer.decode(tokens[word.tokens.start : word.tokens.stop]).strip() == word.text


def test_words_of_plain_text_are_those_of_transformers(tokenizer):
    text = " The cat sat, and the other cat (of 안녕) sat too!"
    reader, tokens, rows = transcript(tokenizer, text)
    theirs, _, indices = tokenization_whisper._combine_tokens_into_words(
        tokenizer, tokens[rows.start + 1 : rows.stop], "english"
    )
    found = reader.words(tokens, rows)
    assert [word.text for word in found] == [word.strip() for word in theirs]
    assert [[at - rows.start - 1 for at in word.tokens] for word in found] == indices


def test_characters_are_words_where_there_are_no_spaces(tokenizer):
    reader, tokens, rows = transcript(tokenizer, "「猫は、ねた。」", language="<|ja|>")
    assert [word.text for word in reader.words(tokens, rows)] == ["「猫", "は、", "ね", "た。」"]


def test_a_prompt_of_earlier_text_is_no_part_of_the_words(tokenizer):
    reader, tokens, _ = transcript(tokenizer, " cat")
    longer = tokenizer(" earlier words", add_special_tokens=False)["input_ids"] + tokens
    (word,) = reader.words(longer, reader.predicting_rows(longer))
    assert word.text == "cat"


def bad(**changes):
    """Arguments of word_times, of which some are wrong."""
    tokens, _ = timed_sequence(5, with_times=False)
    good = {
        "model": changes.pop("model", None) or whisper(),
        "tokenizer": Numbers(),
        "input_features": torch.randn(1, 8, 2 * FRAMES, dtype=torch.float64),
        "sequences": torch.tensor([tokens]),
    }
    return good | changes


def with_heads(heads):
    model = whisper()
    model.generation_config.alignment_heads = heads
    return model


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            lambda: bad(model=nn.Linear(2, 2)),
            ConfigurationError,
            "needs a WhisperForConditionalGeneration; this is a Lin",
        ),
        (lambda: bad(model=whisper(attention="eager")), ConfigurationError, r"regard\.huggingface\.swap\(model\)"),
        (lambda: bad(model=with_heads(None)), ConfigurationError, "has no alignment_heads"),
        (lambda: bad(model=with_heads([[3, 0]])), ConfigurationError, "layer 3, head 0; the decoder has 3 layers of 4"),
        (lambda: bad(sequences=torch.tensor([[3, 4, END]])), ConfigurationError, "sequence 0 has no token 41.*prompt="),
        (lambda: bad(sequences=torch.rand(1, 3)), ShapeError, r"sequences is torch.float32 \(1, 3\)"),
        (lambda: bad(sequences=[[1]]), ShapeError, r"sequences is \[\[1\]\]"),
        (
            lambda: bad(input_features=torch.randn(1, 8, 500)),
            ShapeError,
            r"\(1, 8, 500\).*needs \(1, 8, 134\).*windows",
        ),
        (lambda: bad(input_features=torch.randn(2, 8, 134)), ShapeError, "with 1 sequences it needs"),
        (lambda: bad(num_frames=[1, 2]), ShapeError, r"num_frames is \[1, 2\]; it needs one number for each of 1"),
        (lambda: bad(num_frames=[135]), ShapeError, "of 0 to 134 frames"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        word_times(**arguments())


def test_an_even_median_is_refused():
    model = whisper()
    model.config.median_filter_width = 4
    with pytest.raises(ConfigurationError, match="median_filter_width is 4; it needs to be an odd number"):
        word_times(**bad(model=model))


def test_audio_without_frames_and_text_without_tokens():
    """No frames: all words at 0. No text: no words."""
    (words,) = word_times(**bad(num_frames=[1]))
    assert [(word.start, word.end) for word in words] == [(0.0, 0.0)] * 5
    assert word_times(**bad(sequences=torch.tensor([[START, LANGUAGE, TASK, NO_TIMES, END]]))) == [[]]
    assert word_times(**bad(sequences=torch.tensor([[START, LANGUAGE, TASK, FIRST_TIME]]))) == [[]]
