"""Draw the figures of the mechanism pages: python recipes/mechanism_figures.py [--folder FOLDER] [NAME ...].

Weights of worked examples and of translations, hops of a ring, sinusoids, sizes of caches, sparse patterns: those
that a page shows; with names, these alone. They go into docs/pictures/mechanisms, or another folder, as NAME.png, and
with Korean labels as NAME.ko.png.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from regard import masks, plots, ring
from regard.nn import KVCache
from regard.plots.labels import font_families
from regard.positions import Sinusoidal
from regard.steps import EXAMPLES, worked_example
from regard.translation.run_folder import ENGLISH_FRENCH, KOREAN_ENGLISH
from regard.translation.translator import Translator

FOLDER = Path(__file__).parent.parent / "docs" / "pictures" / "mechanisms"
LENGTH, PROCESSES = 16, 4
SIGNED = LinearSegmentedColormap.from_list("signed", ["#2f76c9", "white", "#d0532f"])
ATTENDED = ListedColormap(["white", "#2f76c9"])
"""Colours whose ends are seen on a white and on a dark page."""
KOREAN, ENGLISH = "고양이가 우유를 마신다", "I am very tired."


Say = Callable[[str, str], str]
"""The English or the Korean one of two texts."""


def ring_figure(say: Say, layout: ring.RingLayout) -> Figure:
    """The hop, counted from 1, in which a ring of four processes computes each pair under a causal mask."""
    owner = torch.empty(LENGTH, dtype=torch.int64)
    for process, pieces in enumerate(layout.pieces(LENGTH, PROCESSES)):
        for piece in pieces:
            owner[list(piece)] = process
    hops = (owner[:, None] - owner) % PROCESSES + 1
    queries, keys = ([f"{letter}{at + 1}·p{process}" for at, process in enumerate(owner.tolist())] for letter in "qk")
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return plots.heatmap(hops, queries, keys, mask=causal, maximum=PROCESSES, unit=say("hop", "단계"))


def sinusoid_figure(say: Say) -> Figure:
    """The embeddings of 64 positions in 32 dimensions, and their dot products over those of a position with itself."""
    embeddings = Sinusoidal(32)(torch.arange(64))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    titles = say("position embeddings", "위치 임베딩"), say("dot products of two positions", "두 위치의 내적")
    position, dimension = say("position", "위치"), say("dimension", "차원")
    for axes, image, title in zip((left, right), (embeddings, embeddings @ embeddings.T / 16), titles, strict=True):
        drawn = axes.imshow(image, cmap=SIGNED, vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(title=title, xlabel=dimension if axes is left else position, ylabel=position)
        figure.colorbar(drawn, ax=axes)
    return figure


def cache_figure(say: Say) -> Figure:
    """Bytes of three caches of a layer with 8 key heads of 128 in bfloat16, token by token."""
    window = masks.causal() & masks.window(before=511)
    caches = {
        "KVCache()": KVCache(),
        "KVCache.static(4096)": KVCache.static(4096),
        "KVCache.rolling(causal() & window(before=511))": KVCache.rolling(window),
    }
    token = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    with torch.no_grad():
        for name, cache in caches.items():
            sizes = []
            for _ in range(4096):
                cache = cache.append(token, token)
                sizes.append(cache.nbytes / 2**20)
            axes.plot(range(1, 4097), sizes, label=name)
    axes.plot([0, 4096], [0, 4096 * token.nbytes * 2 / 2**20], "k:", label=say("keys and values alone", "키와 값만"))
    axes.set(xlabel=say("tokens", "토큰"), ylabel=say("MiB of a layer", "한 층의 MiB"), xlim=(0, 4096), ylim=(0, None))
    axes.legend()
    return figure


def pattern_figure(say: Say) -> Figure:
    """Six sparse masks of 32 positions."""
    causal = masks.causal()
    patterns = {
        "causal() & window(before=5)": causal & masks.window(before=5),
        "causal() & (window(before=5) | strided(6))": causal & (masks.window(before=5) | masks.strided(6)),
        "causal() & fixed(6, 1)": causal & masks.fixed(6, 1),
        "causal() & dilated(3, 4)": causal & masks.dilated(3, 4),
        "window(3, 3) | global_tokens([0, 16])": masks.window(3, 3) | masks.global_tokens([0, 16]),
        "causal() & (window(before=5) | prefix(2))": causal & (masks.window(before=5) | masks.prefix(2)),
    }
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    for axes, (name, mask) in zip(figure.subplots(2, 3).flat, patterns.items(), strict=True):
        axes.imshow(mask.dense(32, 32), cmap=ATTENDED, interpolation="nearest")
        share = f"{mask.density(32, 32):.0%}"
        axes.set_title(f"{name}\n{say(f'{share} of the pairs', f'쌍의 {share}')}", fontsize=9)
        axes.set(xlabel=say("key", "키"), ylabel=say("query", "질의"))
    return figure


def translation_figure(say: Say, folder: Path, sentence: str, *head: int) -> Figure:
    """The weights of a translation over its source, of one head of (layer, head): a row for each word predicted."""
    translation = Translator.load(folder).translate([sentence])[0]
    best = translation.candidates[0]
    rows, columns = ([token.removeprefix("▁") for token in side] for side in (best.tokens, translation.source_tokens))
    return weights_figure(say, best.weights[:, *head].float(), rows, columns)


def weights_figure(say: Say, weights: Tensor, rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """Weights from 0 to 1."""
    return plots.heatmap(weights, rows, columns, maximum=1.0, unit=say("weight", "가중치"))


def example_figures() -> Iterator[tuple[str, tuple]]:
    """Of each worked example a figure for each table of weights, one for each head: what draws it, and its numbers."""
    for name in EXAMPLES:
        steps = worked_example(name)
        for table in (steps[key] for key in steps.keys if key.split(".")[-1] == "weights"):
            *head, _ = table.key.split(".")
            yield "-".join([name, *head]), (weights_figure, table.numbers, table.rows, table.columns)


def shown() -> set[str]:
    """The names of the figures that pages of docs/ show."""
    pages = "".join(page.read_text("utf-8") for page in FOLDER.parent.parent.rglob("*.md"))
    return set(re.findall(r"pictures/mechanisms/([\w-]+)\.png", pages))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="these alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the figures go")
    options = parser.parse_args()
    chosen, on_pages, folder = set(options.names), shown(), options.folder
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, tuple] = dict(example_figures())
    figures |= {
        f"ring-{type(layout).__name__.lower()}": (ring_figure, layout) for layout in (ring.Contiguous(), ring.Zigzag())
    }
    figures |= {"sinusoidal": (sinusoid_figure,), "cache-sizes": (cache_figure,), "sparse-patterns": (pattern_figure,)}
    figures |= {f"translation-{score}": (translation_figure, run, KOREAN) for score, run in KOREAN_ENGLISH.items()}
    figures |= {
        f"translation-layer{layer}-head{head}": (translation_figure, ENGLISH_FRENCH, ENGLISH, layer, head)
        for layer, head in ((0, 3), (2, 1))
    }
    families = font_families("가나다")  # those of matplotlib, and one with Hangul
    with rc_context({"font.family": families}):
        for name, (draw, *arguments) in figures.items():
            if name in (chosen or on_pages):
                plots.save(draw(lambda english, _: english, *arguments), folder / f"{name}.png")
                plots.save(draw(lambda _, korean: korean, *arguments), folder / f"{name}.ko.png")
