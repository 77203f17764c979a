"""When each word of a transcription was spoken, from the cross-attention of a Whisper model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.problem import Problem
from ..errors import ConfigurationError, ShapeError
from ..lenses import Weights
from .observe_model import observing_modules
from .register import check_uses_regard
from .time_warping import alignment_scores, warping_path
from .transcript_words import TokenizedWord, TranscriptReader

SECONDS_PER_FRAME = 0.02
"""Of the encoder's output: each of its frames is two of the features, which are 10 ms apart."""


@dataclass(frozen=True)
class TimedWord:
    """A word and when it was spoken, start to end, in seconds from the start of the audio.

    tokens: the indices of its tokens in the sequence.
    """

    text: str
    start: float
    end: float
    tokens: range


def word_times(
    model: nn.Module,
    tokenizer: Any,
    input_features: Tensor,
    sequences: Tensor,
    *,
    prompt: Sequence[int] | None = None,
    num_frames: Sequence[int] | Tensor | None = None,
) -> list[list[TimedWord]]:
    """The words of transcriptions with their times, by the cross-attention of a Whisper model: a list for each audio.

    The model reads each sequence once more, by a fused kernel, and only the weights of the heads that follow the audio,
    `model.generation_config.alignment_heads`, are computed besides. Each of their frames is standardized over the
    tokens, filtered by a median of `model.config.median_filter_width` frames, and averaged over the heads; dynamic
    time warping then finds the monotonic path of tokens through frames. Times are multiples of 0.02 s.

    A row of the weights belongs to the token that it predicts, so a word ends where the next one starts; the first
    starts at 0. Words are what stands between spaces, with its punctuation; in Chinese, Japanese, Thai, Lao, Burmese
    and Cantonese each character, or token of several. Special tokens and those of times are part of no word.

    Args:
        model: a `WhisperForConditionalGeneration` whose attention regard computes: `attn_implementation="regard"`, or
            after `regard.huggingface.swap(model)`.
        tokenizer: the tokenizer of the model.
        input_features: (batch, mel bins, frames), as the feature extractor returns them.
        sequences: the tokens, int64 (batch, length), as `model.generate` returns them; what follows the first end of
            text is ignored.
        prompt: the tokens before them, `<|startoftranscript|>` and what follows it, such as `tokenizer.prefix_tokens`;
            None where `sequences` start with them.
        num_frames: how many frames of each audio's features are not padding, `attention_mask.sum(-1)` of the feature
            extractor's mask; None for all of them.

    Raises:
        ConfigurationError: another model, one without `alignment_heads` or with heads that it does not have, one that
            does not use regard; sequences without a prompt.
        ShapeError: features, sequences and numbers of frames that do not fit each other or the model.

    Source: Radford et al. 2022 (arXiv 2212.04356) for the model; times, medians and the lists of heads are those of its
    published code, as in transformers' `return_token_timestamps=True`. Four differences: sequences of a batch do not
    change each other's times, as their padding does there; the row that predicts the first token is read where the
    prompt has no times, too; a frame with equal weights of all tokens counts 0 instead of NaN; hyphens and apostrophes
    inside a word do not split it.

    >>> import torch, regard
    >>> from transformers import WhisperConfig, WhisperForConditionalGeneration
    >>> sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8}
    >>> layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    >>> special = {"bos_token_id": 7, "eos_token_id": 7, "pad_token_id": 7, "decoder_start_token_id": 8}
    >>> config = WhisperConfig(vocab_size=9, max_source_positions=50, **sizes, **layers, **special)
    >>> model = WhisperForConditionalGeneration(config).eval()
    >>> _ = regard.huggingface.swap(model)
    >>> model.generation_config.alignment_heads = [[0, 1], [1, 0]]  # layer, head
    >>> class Letters:
    ...     def decode(self, tokens, **options):
    ...         return "".join(" abcdef"[token] for token in tokens)
    >>> words, = regard.huggingface.word_times(
    ...     model, Letters(), torch.randn(1, 8, 100), torch.tensor([[8, 1, 2, 0, 3, 4, 7]])
    ... )
    >>> [(word.text, word.tokens) for word in words]
    [('ab', range(1, 3)), ('cd', range(3, 6))]
    """
    config = _whisper_config(model)
    heads = _alignment_heads(model)
    reader = TranscriptReader.from_model(model, tokenizer)
    sequences = _with_prompt(reader, sequences, prompt)
    frames = _frames(model, input_features, len(sequences), num_frames)
    weights = _head_weights(model, heads, input_features, sequences)
    found = []
    for tokens, own, count in zip(sequences.tolist(), weights, frames, strict=True):
        rows = reader.predicting_rows(tokens)
        starts = row_times(own[:, rows.start : rows.stop, :count], config.median_filter_width)
        # The row before a token predicts it, so that the token's own row starts where the token ends.
        found.append([_timed(word, rows, starts) for word in reader.words(tokens, rows)])
    return found


def row_times(weights: Tensor, median_width: int) -> list[float]:
    """When each row starts, in seconds, from the weights of some heads (heads, rows, frames)."""
    if not weights.shape[1] or not weights.shape[2]:
        return [0.0] * weights.shape[1]
    rows, frames = warping_path(-alignment_scores(weights, median_width).double().cpu().numpy())
    starts = frames[[at for at, row in enumerate(rows) if not at or row != rows[at - 1]]]
    return (starts * SECONDS_PER_FRAME).tolist()


@dataclass(frozen=True)
class HeadWeights:
    """A lens: the weights of some heads alone, (batch, heads, rows, columns). No mask or bias of single heads."""

    heads: tuple[int, ...]

    def start(self, problem: Problem) -> _HeadWeightsState:
        """The state of one run."""
        return _HeadWeightsState(list(self.heads))


class _HeadWeightsState:
    """Computes the weights of the heads in `finish`, from their log-sum-exp."""

    reductions = ()

    def __init__(self, heads: list[int]) -> None:
        self.heads = heads

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        pairs = replace(problem.pairs, query=problem.pairs.query[:, self.heads], key=problem.pairs.key[:, self.heads])
        chosen = replace(problem, pairs=pairs, value=problem.value[:, self.heads])
        return Weights().compute(chosen, lse[:, self.heads])


def _whisper_config(model: nn.Module) -> Any:
    """The configuration of a Whisper model that generates, checked."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "whisper" or not hasattr(model, "generation_config"):
        raise ConfigurationError(
            f"word_times needs a WhisperForConditionalGeneration; this is a {type(model).__name__}"
        )
    return config


def _alignment_heads(model: Any) -> dict[int, tuple[int, ...]]:
    """By decoder layer, the heads that follow the audio."""
    check_uses_regard(model)
    listed = getattr(model.generation_config, "alignment_heads", None)
    if not listed:
        raise ConfigurationError(
            "model.generation_config has no alignment_heads, the [layer, head] pairs of the decoder whose "
            "cross-attention follows the audio: published Whisper models list them in generation_config.json; for one "
            "trained further, copy those of the model that it was trained from"
        )
    layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
    by_layer: dict[int, tuple[int, ...]] = {}
    for layer, head in listed:
        if not (0 <= layer < layers and 0 <= head < heads):
            raise ConfigurationError(
                f"alignment_heads has layer {layer}, head {head}; the decoder has {layers} layers of {heads} heads, "
                "counted from 0: the list needs to be that of a model of this size"
            )
        by_layer[layer] = (*by_layer.get(layer, ()), head)
    return by_layer


def _with_prompt(reader: TranscriptReader, sequences: Tensor, prompt: Sequence[int] | None) -> Tensor:
    """The sequences with the prompt in front, checked."""
    if not isinstance(sequences, Tensor) or sequences.ndim != 2 or sequences.is_floating_point():
        has = f"{sequences.dtype} {tuple(sequences.shape)}" if isinstance(sequences, Tensor) else repr(sequences)[:80]
        raise ShapeError(
            f"sequences is {has}; it needs to be whole numbers, (batch, length), as model.generate returns"
        )
    if prompt is not None:
        front = torch.tensor(list(prompt), dtype=sequences.dtype, device=sequences.device)
        sequences = torch.cat([front.expand(len(sequences), -1), sequences], 1)
    for at, tokens in enumerate(sequences.tolist()):
        if reader.prompt_start not in tokens:
            raise ConfigurationError(
                f"sequence {at} has no token {reader.prompt_start}, with which a transcript starts: model.generate "
                "returns none of its prompt unless it returns a dictionary; give prompt=tokenizer.prefix_tokens"
            )
    return sequences


def _frames(model: Any, input_features: Tensor, batch: int, num_frames: Sequence[int] | Tensor | None) -> list[int]:
    """How many frames of the encoder's output are of each audio, checked with the sizes of the features."""
    most = model.config.max_source_positions
    needed = batch, model.config.num_mel_bins, 2 * most
    if tuple(input_features.shape) != needed:
        raise ShapeError(
            f"input_features has the shape {tuple(input_features.shape)}; with {batch} sequences it needs {needed}, "
            f"{most * SECONDS_PER_FRAME:g} s of audio each: cut a longer one into windows, and add their starts to the "
            "times"
        )
    if num_frames is None:
        return [most] * batch
    counts = [int(count) for count in num_frames]
    if len(counts) != batch or not all(0 <= count <= 2 * most for count in counts):
        raise ShapeError(
            f"num_frames is {counts}; it needs one number for each of {batch} sequences, of 0 to {2 * most} frames of "
            "the features: attention_mask.sum(-1) of what the feature extractor returns"
        )
    return [count // 2 for count in counts]


def _head_weights(model: Any, heads: dict[int, tuple[int, ...]], input_features: Tensor, sequences: Tensor) -> Tensor:
    """The weights of the chosen heads, (batch, heads, length, frames), of one pass over whole sequences."""
    named = {name for name, _ in model.named_modules()}
    lenses = {}
    for layer, chosen in heads.items():
        name = next(name for name in named if name.endswith(f"decoder.layers.{layer}.encoder_attn"))
        lenses[name] = HeadWeights(chosen)
    with torch.no_grad(), observing_modules(model, {name: (lens,) for name, lens in lenses.items()}) as views:
        model(input_features=input_features, decoder_input_ids=sequences, use_cache=False)
    return torch.cat([views[name][0][lens] for name, lens in lenses.items()], 1)


def _timed(word: TokenizedWord, rows: range, starts: list[float]) -> TimedWord:
    """A word with its times: it starts with the row that predicts its first token."""
    first, last = word.tokens[0] - 1 - rows.start, word.tokens[-1] - rows.start
    return TimedWord(word.text, starts[first], starts[last], word.tokens)
