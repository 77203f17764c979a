"""Word alignments of translations, read off the cross-attention of the English-French translator that ships.

    python examples/translation_alignment.py [--picture alignment.svg]

Each head of the decoder's cross-attention has weights of a French token t on the English tokens s,

    w_ts = softmax_s( q_t · k_s / √D ),

and a French word is linked to the English word with the largest weight. The pairs below are aligned by forced decoding,
which reads the weights on a translation that is there already, and compared with links written by hand, one English
word for each French word. "A black cat" is "un chat noir": the order of words is no help there.

Printed: how many of the links by hand are found by the mean of all heads, by the head that is best on the first half of
the pairs (on the second half, beside the mean there), and by the diagonal, word t to word t; then one alignment by the
mean. Eight pairs are an illustration and no measurement of the translator.
"""

from __future__ import annotations

import argparse

import regard
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

PAIRS = [  # English, French, for each French word the number of its English word, counted from 0
    ("I have a black cat .", "J'ai un chat noir .", [1, 2, 4, 3, 5]),
    ("The cat is on the table .", "Le chat est sur la table .", [0, 1, 2, 3, 4, 5, 6]),
    ("He has a red car .", "Il a une voiture rouge .", [0, 1, 2, 4, 3, 5]),
    ("I am very tired .", "Je suis très fatigué .", [0, 1, 2, 3, 4]),
    ("She has a white dog .", "Elle a un chien blanc .", [0, 1, 2, 4, 3, 5]),
    ("He is reading a book .", "Il lit un livre .", [0, 2, 3, 4, 5]),
    ("We have a green house .", "Nous avons une maison verte .", [0, 1, 2, 4, 3, 5]),
    ("The red book is on the table .", "Le livre rouge est sur la table .", [0, 2, 1, 3, 4, 5, 6, 7]),
]


def found(translator: Translator, pairs: list, layer: int | None = None, head: int | None = None) -> float:
    """The share of the links by hand that are the largest weight of their French word."""
    sources, targets, by_hand = zip(*pairs, strict=True)
    aligned = translator.align(sources, targets, layer=layer, head=head)
    hits = [
        (english, french) in one.links
        for one, numbers in zip(aligned, by_hand, strict=True)
        for french, english in enumerate(numbers)
    ]
    return sum(hits) / len(hits)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Align the pairs, print the figures and return them."""
    parser = argparse.ArgumentParser(description="Word alignments from the cross-attention of a translator.")
    parser.add_argument("--picture", help="draw one alignment here: .png, .svg or .pdf")
    picture = parser.parse_args(arguments).picture
    translator = Translator.load(ENGLISH_FRENCH)
    layers, heads = translator.translate(["Hello."])[0].candidates[0].weights.shape[1:3]
    first, second = PAIRS[: len(PAIRS) // 2], PAIRS[len(PAIRS) // 2 :]
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    best = max(places, key=lambda place: found(translator, first, *place))
    links = [(french, english) for *_, numbers in PAIRS for french, english in enumerate(numbers)]
    figures = {
        "mean of all heads": found(translator, PAIRS),
        "diagonal": sum(french == english for french, english in links) / len(links),
        "best head, second half": found(translator, second, *best),
        "mean of all heads, second half": found(translator, second),
    }
    print(f"{len(links)} links by hand in {len(PAIRS)} pairs; best head on the first half: {best[0]}-{best[1]}")
    for name, figure in figures.items():
        print(f"  {name:32}{figure:.1%}")
    english, french, _ = PAIRS[0]
    (pair,) = translator.align([english], [french])
    for source, target in pair.links:
        print(f"  {french.split()[target]:8} {english.split()[source]}")
    if picture:
        figure = regard.plots.alignment(pair.links, english.split(), french.split(), title="Cross-attention")
        regard.plots.save(figure, picture)
    return figures


if __name__ == "__main__":
    main()
