"""The forms of the words of `recipes/news-words.tsv`, English beside French, by classes that can stand for each other.

A line of that table is a class, an English word and its French one; an adjective has two French ones where masculine
and feminine differ. Nouns and adjectives get a plural, verbs their tenses. All French verbs there end in -er, so that
one set of endings serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

WORDS = Path(__file__).with_name("news-words.tsv")
Form = tuple[str, str, str]
"""A class, an English form and its French one."""

VOWELS = "aeiou"
PLURALS = {
    "bacterium": "bacteria", "child": "children", "craftsman": "craftsmen", "fisherman": "fishermen", "foot": "feet",
    "half": "halves", "knife": "knives", "leaf": "leaves", "life": "lives", "mouse": "mice", "nobleman": "noblemen",
    "nucleus": "nuclei", "person": "people", "species": "species", "series": "series", "sheep": "sheep",
    "spokesman": "spokesmen", "thief": "thieves", "tooth": "teeth", "wife": "wives", "wolf": "wolves",
    "woman": "women", "hypothesis": "hypotheses", "analysis": "analyses", "crisis": "crises", "thesis": "theses",
    "oasis": "oases",
}  # fmt: skip
UNCOUNTED = frozenset({
    "agriculture", "blood", "carbon", "copper", "east", "equipment", "evidence", "gold", "gravity", "health",
    "hunger", "hydrogen", "ice", "information", "internet", "iron", "justice", "knowledge", "lead", "money", "music",
    "news", "nitrogen", "north", "oil", "oxygen", "peace", "physics", "police", "politics", "pollution", "poverty",
    "progress", "rain", "research", "sand", "silence", "silver", "snow", "software", "south", "tourism", "transport",
    "uranium", "water", "weather", "west", "youth",
})  # fmt: skip
"""Nouns without a plural, or with one of another sense."""
PASTS = {
    "bet": "bet", "break": "broke", "breed": "bred", "buy": "bought", "cost": "cost", "cut": "cut", "dig": "dug",
    "draw": "drew", "dream": "dreamt", "eat": "ate", "fall": "fell", "find": "found", "fly": "flew",
    "forget": "forgot", "freeze": "froze", "give": "gave", "hide": "hid", "hit": "hit", "keep": "kept", "lead": "led",
    "leave": "left", "lend": "lent", "mean": "meant", "overtake": "overtook", "pay": "paid", "seek": "sought",
    "send": "sent", "shine": "shone", "shoot": "shot", "show": "showed", "sing": "sang", "sink": "sank",
    "sow": "sowed", "speak": "spoke", "spend": "spent", "spread": "spread", "steal": "stole", "sting": "stung",
    "strike": "struck", "swear": "swore", "swim": "swam", "teach": "taught", "tell": "told", "throw": "threw",
    "win": "won", "withdraw": "withdrew",
}  # fmt: skip
DOUBLED = frozenset({
    "ban", "bet", "chat", "commit", "control", "cut", "dig", "equip", "expel", "forget", "hit", "hug", "label",
    "patrol", "plan", "program", "rob", "scan", "ship", "step", "stir", "stop", "swim", "transmit", "trap", "travel",
    "win", "wrap",
})  # fmt: skip
"""Verbs that double their last letter before -ed and -ing."""


def inflected(words: Path = WORDS) -> Iterator[Form]:
    """All forms of a table of words, in its order, each once."""
    seen: set[Form] = set()
    for line in words.read_text(encoding="utf-8").splitlines():
        kind, english, french = line.split("\t")
        for form in _forms(kind, english, french):
            if form not in seen:
                seen.add(form)
                yield form


def _forms(kind: str, english: str, french: str) -> Iterator[Form]:
    if kind.startswith("noun"):
        yield kind, english, french
        if english not in UNCOUNTED:
            yield f"{kind}, plural", english_plural(english), french_plural(french)
    elif kind == "adjective":
        masculine, feminine = french.split() if " " in french else (french, french)
        for gender, form in (("masculine", masculine), ("feminine", feminine)):
            yield f"{kind} ({gender})", english, form
            yield f"{kind} ({gender}, plural)", english, french_plural(form)
    elif kind == "verb":
        yield from _verb_forms(english, french)
    else:
        yield kind, english, french


def _verb_forms(english: str, french: str) -> Iterator[Form]:
    stem = french.removesuffix("er")
    soft = re.sub("c$", "ç", re.sub("g$", "ge", stem))  # before a: plaçait, mangeait
    past, strong = english_past(english), strong_stem(stem)
    yield "infinitive", english, french
    yield "participle, present", with_ending(english, "ing"), soft + "ant"
    for ending in ("é", "ée", "és", "ées"):
        yield f"participle in -{ending}", past, stem + ending
    yield "present, singular", third_person(english), strong + "e"
    yield "present, plural", english, strong + "ent"
    yield "past", past, soft + "a"
    yield "imperfect", past, soft + "ait"


def english_plural(noun: str) -> str:
    """The plural of an English noun."""
    return PLURALS.get(noun) or third_person(noun)


def third_person(word: str) -> str:
    """A word with -s: "watches", "tries"."""
    if word[-1] == "y" and word[-2] not in VOWELS:
        return word[:-1] + "ies"
    return word + ("es" if re.search("(s|x|z|ch|sh)$", word) else "s")


def english_past(verb: str) -> str:
    """The past of an English verb."""
    return PASTS.get(verb) or with_ending(verb, "ed")


def with_ending(verb: str, ending: str) -> str:
    """An English verb with -ed or -ing: "planned", "tried", "using"."""
    if verb in DOUBLED:
        return verb + verb[-1] + ending
    if verb[-1] == "e" and not (ending == "ing" and verb.endswith(("ee", "ye"))):
        return verb[:-1] + ending
    if verb[-1] == "y" and verb[-2] not in VOWELS and ending == "ed":
        return verb[:-1] + "ied"
    return verb + ending


def french_plural(word: str) -> str:
    """The plural of a French noun or adjective."""
    if word[-1] in "sxz":
        return word
    if word.endswith(("eau", "eu")) and word != "bleu":
        return word + "x"
    if word.endswith("al") and word not in ("festival", "canal", "final", "naval"):
        return word[:-2] + "aux"
    return {"travail": "travaux", "bijou": "bijoux", "canal": "canaux", "porte-parole": word}.get(word, word + "s")


def strong_stem(stem: str) -> str:
    """The stem of a French verb in -er before a mute ending: "lève", "considère", "emploie"."""
    if stem.endswith(("oy", "uy")):
        return stem[:-1] + "i"
    if stem.endswith(("appel", "jet", "renouvel")):
        return stem + stem[-1]
    return re.sub("[eé]([bcdfghjklmnpqrstvz]|[bcdfgptv][lr]|gn|qu)$", r"è\1", stem)
