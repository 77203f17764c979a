"""Speech: a model of Whisper's shape, and the times of words read off its cross-attention.

    python examples/speech_alignment.py [--picture times.svg]

An encoder reads the log spectrum of a signal: two convolutions, the second of which halves the number of frames, and a
Transformer block. A decoder writes words, one after another, and attends to the frames (Radford et al. 2022). Only the
words are learned, never their times. In word t the mean of the heads has the weights on the frames j

    w_tj = softmax_j(q_t · k_j / √12)

and `regard.lenses.warping_path` finds the monotonic path through words and frames with the most weight.

The signal is synthetic: a word is one of 12 ordered pairs of two out of four tones, each for half of its 120 to 320 ms,
in noise; half of the words have a pause of up to 150 ms before them; 4 to 6 words, all different, in 2 s. A frame is
25 ms. Times are read with the right words given, on 200 other utterances.

Printed: how many next words are right, given those before; the weight on the frames of the word itself, beside equal
weights; then errors in ms. For the middle of each word: equal division, which cuts the time from 0 to the end of the
last word, taken as known, into equal parts; and the frame with the most weight on the word's part of the path. For the
start of each word but the first: equal division; the frame where the path comes to the word, as Whisper reads it (from
filtered weights of chosen heads, here from the mean of all); and halfway between the middles of the word and of the one
before. The weights lie where the tone changes, in the middle of a word, and say little of where it begins.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import regard
from regard.lenses import Weights, warping_path
from regard.nn import Attention, FeedForward, PreNorm, Projections, TransformerBlock
from regard.positions import Learned, Rotary, Sinusoidal

RATE, SECONDS, HOP, SPECTRUM = 2000, 2.0, 25, 64
FRAME = 2 * HOP / RATE
"""Seconds of a frame of the encoder."""
TONES = (200.0, 350.0, 550.0, 800.0)
WORDS = list(itertools.permutations(range(len(TONES)), 2))
MOST, END, START, DIM, HEADS = 6, len(WORDS), len(WORDS) + 1, 48, 4


class Utterances(NamedTuple):
    """spectra (count, 160, 33), words (count, 7) with END after the last, starts and ends (count, 6) in seconds."""

    spectra: Tensor
    words: Tensor
    starts: Tensor
    ends: Tensor

    @property
    def there(self) -> Tensor:
        """Which places have a word, (count, 6)."""
        return self.words[:, :MOST] != END


def make_utterances(count: int, draw: torch.Generator) -> Utterances:
    """Signals as spectra, with the words and their times."""
    words = torch.rand(count, len(WORDS), generator=draw).argsort(1)[:, :MOST]
    lengths = 0.12 + 0.2 * torch.rand(words.shape, generator=draw)
    pauses = 0.15 * torch.rand(words.shape, generator=draw) * (torch.rand(words.shape, generator=draw) < 0.5)
    ends = (lengths + pauses).cumsum(1) + 0.05
    starts = ends - lengths
    there = (torch.arange(MOST) < torch.randint(4, MOST + 1, (count, 1), generator=draw)) & (ends < SECONDS)

    time = torch.arange(int(RATE * SECONDS)) / RATE
    signal = 0.15 * torch.randn(count, len(time), generator=draw)
    pitch = torch.zeros_like(signal)  # in hertz, 0 = silence
    tones = torch.tensor([[TONES[first], TONES[second]] for first, second in WORDS])[words]
    for place in range(MOST):
        part = (time - starts[:, place, None]) / lengths[:, place, None]  # from 0 to 1 in the word
        tone = torch.where(part < 0.5, tones[:, place, :1], tones[:, place, 1:])
        pitch += tone * ((part >= 0) & (part < 1) & there[:, place, None])
    signal += (2 * math.pi / RATE * pitch.cumsum(1)).sin() * (pitch > 0)
    spectra = torch.stft(signal, SPECTRUM, HOP, window=torch.hann_window(SPECTRUM), return_complex=True).abs()
    words = torch.cat([words.masked_fill(~there, END), torch.full((count, 1), END)], 1)
    return Utterances((spectra + 0.01).log().mT[:, :-1], words, starts, ends)


class Recogniser(nn.Module):
    """Logits of each next word, (count, 7, 13), given the sound and the words before."""

    def __init__(self) -> None:
        super().__init__()

        def residual() -> PreNorm:
            return PreNorm(nn.LayerNorm(DIM))

        def feed_forward() -> FeedForward:
            return FeedForward(DIM, 4 * DIM)

        self.convolutions = nn.Sequential(
            nn.Conv1d(SPECTRUM // 2 + 1, DIM, 3, padding=1),
            nn.GELU(),
            nn.Conv1d(DIM, DIM, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.times = Sinusoidal(DIM)
        # Whisper has no rotary embedding; with it this model learns in seconds which word came before a frame.
        listening = Attention(Projections(DIM, HEADS), rotary=Rotary(DIM // HEADS))
        self.encoder = TransformerBlock(listening, feed_forward(), residual)
        self.memory = nn.LayerNorm(DIM)
        self.words, self.places = nn.Embedding(len(WORDS) + 2, DIM), Learned(MOST + 1, DIM)
        writing = Attention(Projections(DIM, HEADS), mask=regard.masks.causal())
        self.decoder = TransformerBlock(
            writing, feed_forward(), residual, cross_attention=Attention(Projections(DIM, HEADS))
        )
        self.logits = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, len(WORDS) + 1))

    def encode(self, spectra: Tensor) -> Tensor:
        """(count, 160, 33) as frames (count, 80, 48)."""
        frames = self.convolutions(spectra.mT).mT
        return self.memory(self.encoder(frames + self.times(torch.arange(frames.shape[1]))))

    def inputs(self, words: Tensor) -> Tensor:
        """The word before each, with its place."""
        before = nn.functional.pad(words[:, :-1], (1, 0), value=START)
        return self.words(before) + self.places(torch.arange(words.shape[1]))

    def forward(self, spectra: Tensor, words: Tensor) -> Tensor:
        return self.logits(self.decoder(self.inputs(words), self.encode(spectra)))

    def weights(self, spectra: Tensor, words: Tensor) -> Tensor:
        """The mean over heads of the cross-attention's weights, (count, 7, 80)."""
        lens = Weights()
        seen = self.decoder.observe(self.inputs(words), lens, memory=self.encode(spectra)).cross_attention
        assert seen is not None  # this block has cross-attention
        return seen[lens].mean(1)


def counted(words: Tensor) -> Tensor:
    """Which words are to be predicted: all, and one END."""
    return nn.functional.pad(words[:, :-1] != END, (1, 0), value=True)


def train(model: Recogniser, data: Utterances, updates: int, draw: torch.Generator) -> None:
    """AdamW on batches of 16 utterances."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=updates)
    for _ in range(updates):
        batch = torch.randint(len(data.words), (16,), generator=draw)
        words = data.words[batch]
        logits, predicted = model(data.spectra[batch], words), counted(words)
        loss = nn.functional.cross_entropy(logits[predicted], words[predicted])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def word_times(weights: Tensor) -> tuple[Tensor, Tensor]:
    """(count, words + 1, frames) as the start and the middle of each word in seconds, by the path, (count, words + 1).

    The start is the first frame of the path in the row of the word, the middle the frame of it with the most weight.
    """
    path = warping_path(weights)
    rows, frames, end = path[..., 0].clamp(min=0), path[..., 1], path[..., 0] < 0
    latest = weights.shape[2]
    first = torch.full(weights.shape[:2], latest).scatter_reduce(1, rows, frames.masked_fill(end, latest), "amin")
    on_path = torch.zeros_like(weights)
    on_path.flatten(1).scatter_(1, (rows * latest + frames).masked_fill(end, 0), 1.0)
    return first * FRAME, ((weights * on_path).argmax(2) + 0.5) * FRAME


def measure(weights: Tensor, data: Utterances) -> dict[str, Tensor]:
    """Errors of all words in ms, by what was read and how; utterances with as many words are taken together."""
    errors: dict[str, list[Tensor]] = {}
    counts = data.there.sum(1)
    for count in counts.unique().tolist():
        chosen = counts == count
        starts, ends = data.starts[chosen, :count], data.ends[chosen, :count]
        path_starts, middles = (times[:, :count] for times in word_times(weights[chosen, : count + 1]))
        equal = ends[:, -1:] / count * torch.arange(count)
        read = {
            "middle, equal division": equal + ends[:, -1:] / count / 2 - (starts + ends) / 2,
            "middle, most weight": middles - (starts + ends) / 2,
            "start, equal division": (equal - starts)[:, 1:],
            "start, path": (path_starts - starts)[:, 1:],
            "start, between middles": (middles[:, 1:] + middles[:, :-1]) / 2 - starts[:, 1:],
        }
        for name, differences in read.items():
            errors.setdefault(name, []).append(1000 * differences.abs().flatten())
    return {name: torch.cat(parts) for name, parts in errors.items()}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, print the figures and return them."""
    parser = argparse.ArgumentParser(description="Times of words from the cross-attention of a speech model.")
    parser.add_argument("--updates", type=int, default=400, help="of the training")
    parser.add_argument("--picture", help="draw one utterance, its weights and times here: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    test, data = make_utterances(200, draw), make_utterances(2000, draw)
    model = Recogniser()
    train(model, data, options.updates, draw)

    with torch.no_grad():
        right = (model(test.spectra, test.words).argmax(2) == test.words)[counted(test.words)]
        weights = model.weights(test.spectra, test.words)
    centres = (torch.arange(weights.shape[2]) + 0.5) * FRAME
    inside = (centres >= test.starts[..., None]) & (centres < test.ends[..., None])
    figures = {
        "next words right": float(right.float().mean()),
        "weight on the word": float((weights[:, :MOST] * inside).sum(2)[test.there].mean()),
        "equal weights": float(inside.float().mean(2)[test.there].mean()),
    }
    for name, figure in figures.items():
        print(f"{name:26}{figure:.1%}")
    print("error in ms                 mean  median")
    for name, errors in measure(weights, test).items():
        figures[name], figures[f"{name}, median"] = float(errors.mean()), float(errors.median())
        print(f"  {name:26}{errors.mean():4.0f}{errors.median():8.0f}")
    if options.picture:
        draw_utterance(test, weights, options.picture)
    return figures


def draw_utterance(data: Utterances, weights: Tensor, path: str) -> None:
    """The spectrum and the weights of the first utterance; a white line is the path, a frame a word's true time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    count = int(data.there[0].sum())
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.imshow(data.spectra[0].T.numpy(), aspect="auto", origin="lower", extent=(0, SECONDS, 0, RATE / 2))
    upper.set(ylabel="hertz", title="Log spectrum, and the weights of the cross-attention with the path")
    shown = weights[0, : count + 1]
    lower.imshow(shown.numpy(), aspect="auto", extent=(0, SECONDS, count + 0.5, -0.5))
    steps = warping_path(shown)
    steps = steps[steps[:, 0] >= 0].numpy()
    lower.plot((steps[:, 1] + 0.5) * FRAME, steps[:, 0], "w-", linewidth=1)
    for place in range(count):
        left, width = float(data.starts[0, place]), float(data.ends[0, place] - data.starts[0, place])
        lower.add_patch(Rectangle((left, place - 0.5), width, 1, fill=False, edgecolor="cyan"))
    names = [f"{TONES[first]:.0f}→{TONES[second]:.0f}" for first, second in WORDS] + ["end"]
    lower.set_yticks(range(count + 1), [names[int(word)] for word in data.words[0, : count + 1]])
    lower.set(xlabel="seconds")
    regard.plots.save(figure, path)


if __name__ == "__main__":
    main()
