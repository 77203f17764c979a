"""The challenge set of copying: 300 English lines with numbers, names, addresses and quoted words to be kept.

    python recipes/copying_challenge.py > recipes/copying-challenge.tsv
    python recipes/copying_challenge.py --checkpoint FOLDER

Without a checkpoint it prints the set: kind, line, and what a translation has to hold, parted by " | ". With one it
translates the lines, and prints how many hold all of it. A translation that is its source holds nothing: it is none.

The sentences were written before any model was trained with placeholders, and are in no training text.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

SET = Path(__file__).with_name("copying-challenge.tsv")
EACH = 75

VALUES = {
    "number": (
        "17|23|42|68|91|104|250|317|999|1,299.99|12,500|2,048|0.75|3.14|98.6|7:45|19:30|23:59|1987|2031|2024-05-06|"
        "555-0142|64|1,024|36|73|88|145|612|4,096"
    ),
    "name": (
        "Ngozi|Okonkwo|Katarzyna|Hiroshi|Saoirse|Mbappé|Ljubljana|Reykjavik|Wollongong|Tashkent|O'Connell|Villanueva|"
        "Zuckerberg|Thorvald|Anneliese|Quetzal|Nakamura|Esperanza|Baskerville|Chattanooga|Priyanka|Yevgeny|Ouagadougou|"
        "Van-Houten|Mwangi|Siobhan|Fitzwilliam|Antananarivo|Rajesh|Kowalski"
    ),
    "address": (
        "https://example.org|www.example.com|https://docs.example.net/en/latest/|info@example.org|"
        "anna.berg@mail.example.com|http://localhost:8080/status|https://example.com/search?q=tea&page=2|example.org|"
        "report.pdf|notes.txt|@weather_now|#climate|https://example.org/a/b/c.html|setup.exe|backup.tar.gz|"
        "https://shop.example.co.uk/cart/771|jobs@example.edu|www.museum.example/tickets|main.py|photo_2031.jpg"
    ),
    "quoted word": (
        "serendipity|gossamer|petrichor|halcyon|ephemeral|zugzwang|kerfuffle|flummox|quixotic|mellifluous|lagniappe|"
        "bamboozle|defenestrate|sonder|umami|open sesame|widdershins|gobbledygook|skedaddle|hullabaloo|blue note|"
        "ragamuffin|nincompoop|bumfuzzle|cattywampus"
    ),
}
"""What has to be copied, by kind; a | parts two."""

FRAMES = {
    "number": """\
I have {} books at home.
The room number is {}.
She waited for {} minutes and then left.
There were {} people in the street.
We need {} more chairs for tonight.
My sister paid {} euros for this bag.
He wrote the number {} on the wall.
The answer is not {}, it is {}.
Between {} and {}, which one would you choose?
{} dogs are running across the field.
Two men carry a box with the number {} on it.
In {}, my father bought his first car.
The player with the number {} throws the ball to the player with the number {}.
I called {} yesterday, but nobody answered.
They sold {} tickets in {} hours.
Why does it say {} on your shirt?""",
    "name": """\
{} is my best friend.
I met {} in front of the station.
Have you ever been to {}?
{} and {} are playing football in the park.
My name is {}, and I live in {}.
A woman named {} is reading a book under a tree.
We are waiting for {}.
{} gave the keys to {}.
The train from {} to {} is late.
Where did {} go last night?
Do you know if {} is coming tonight?
I think that {} does not like me.
Dr. {} will see you now.
Everyone in {} knows {}.
A man from {} is selling fruit on the street.
The house of {} is very old.""",
    "address": """\
You can find everything at {}.
Please write to {} before Monday.
Open {} and read it.
Have you seen {}?
I cannot open {} on this computer.
The photos are on {}, and the music is on {}.
She sent me {} this morning.
For more help, go to {}.
Do not delete {}!
Go to {} and click on the red button.
My brother works for {}.
A sign on the wall says {}.
If {} does not work, try {}.
Everything that I know is from {}.
The page {} is very slow today.
Copy {} to your computer.""",
    "quoted word": """\
The word "{}" is hard to spell.
What does "{}" mean?
He wrote "{}" on the wall.
A man is wearing a shirt that says "{}".
I have never heard the word "{}" before.
She looked for "{}" in the dictionary.
How do you say "{}" in French?
The password is "{}".
The children laughed at the word "{}".
I like "{}" more than "{}".
The sign above the door says "{}".
We named our boat "{}".
Nobody in my class knows what "{}" means.
Do not say "{}" to my mother.
My favorite word is "{}", and yours is "{}".
The song "{}" is about a long journey.""",
}
"""Sentences of each kind; each {} is a value."""


def lines() -> list[tuple[str, str, list[str]]]:
    """The 300 lines: kind, sentence, and the values in it."""
    chosen = random.Random(1)
    found: dict[str, tuple[str, str, list[str]]] = {}
    for kind, frames in FRAMES.items():
        values = VALUES[kind].split("|")
        unused = itertools.cycle(chosen.sample(values, len(values)))
        for frame in itertools.islice(itertools.cycle(frames.splitlines()), EACH):
            held = [next(unused) for _ in range(frame.count("{}"))]
            if (line := frame.format(*held)) in found:
                held = [next(unused), *held[1:]]
                line = frame.format(*held)
            found[line] = kind, line, held
    assert len(found) == EACH * len(FRAMES)
    return list(found.values())


def holds(translation: str, source: str, values: list[str]) -> bool:
    """Whether a translation has each value as it is, with no letter or digit beside it."""
    whole = (rf"(?<!\w){re.escape(value)}(?!\w)" for value in values)
    return translation != source and all(re.search(one, translation) for one in whole)


def main() -> None:
    """Print the set, or how much of it a translator copies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help=f"folder of a translator, such as {ENGLISH_FRENCH.name}")
    parser.add_argument("--show", action="store_true", help="print what is not copied")
    arguments = parser.parse_args()
    if arguments.checkpoint is None:
        sys.stdout.writelines(f"{kind}\t{line}\t{' | '.join(values)}\n" for kind, line, values in lines())
        return
    sys.stdout.writelines(f"{line}\n" for line in report(Translator.load(arguments.checkpoint), show=arguments.show))


def report(translator: Translator, *, show: bool = False) -> Iterator[str]:
    """How many lines of each kind a translator copies; with `show` also those that it does not."""
    challenge = [line.split("\t") for line in SET.read_text("utf-8").splitlines()]
    found = translator.translate([line for _, line, _ in challenge], observe=False)
    good, all_lines = Counter[str](), Counter[str]()
    for (kind, line, values), translation in zip(challenge, found, strict=True):
        held = holds(translation.text, line, values.split(" | "))
        for name in (kind, "all"):
            good[name] += held
            all_lines[name] += 1
        if show and not held:
            yield f"{kind}: {line}  ->  {translation.text}"
    for kind, count in all_lines.items():
        yield f"{kind}: {good[kind]} of {count} lines, {100 * good[kind] / count:.1f} %"


if __name__ == "__main__":
    main()
