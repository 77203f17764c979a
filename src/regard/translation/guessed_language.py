"""The language that a line seems to be in: by the script of its letters, and by its most frequent words."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter

_WORDS = {
    "en": "the a an and or but is are was were be been have has had do does did not no of to in on at for with from by "
    "this that these those it he she we they you i my your his her its our their what who how when where why there "
    "as me him them us am come met all can will would could should may might must if so than then up out go get "
    "got one some any more most such only own same too very about into over per",
    "fr": "le la les un une des du de et ou est sont était étaient être a ont avait dans sur pour avec par pas ne que "
    "qui ce cette ces il elle nous vous ils elles je tu mon ton son sa ses leur leurs au aux en se",
    "de": "der die das den dem des ein eine einen einem einer und oder ist sind war waren sein hat haben hatte nicht "
    "kein keine mit von zu im auf für aus bei nach wie ich du er sie es wir ihr mein dein sich auch noch dass",
    "es": "el la los las un una unos unas y o es son era eran ser está están ha han había no en con por para de del al "
    "que se su sus lo le les yo tú él ella nosotros ellos mi tu este esta como más pero muy",
    "it": "il lo la gli le un una uno e o è sono era erano essere ha hanno aveva non in con per di del della dei delle "
    "al alla che si suo sua loro io tu lui lei noi voi mio tuo questo questa come più ma nel nella",
    "pt": "o a os as um uma e ou é são era eram ser está estão tem têm não em com por para de do da dos das ao à que "
    "se seu sua eu tu ele ela nós eles meu este esta como mais mas no na você muito",
    "nl": "de het een en of is zijn was waren ben heeft hebben had niet geen in op met van voor aan te dat die deze "
    "dit ik jij je hij zij ze wij we jullie mijn zijn haar er ook maar om naar bij uit",
}
_LANGUAGES: dict[str, list[str]] = {}
for _code, _words in _WORDS.items():
    for _word in set(_words.split()):
        _LANGUAGES.setdefault(_word, []).append(_code)
NAMES = {
    "en": "English",
    "fr": "French",
    "de": "German",
    "es": "Spanish",
    "it": "Italian",
    "pt": "Portuguese",
    "nl": "Dutch",
    "ko": "Korean",
    "ja": "Japanese",
    "zh": "Chinese",
    "ru": "Russian",
    "el": "Greek",
    "ar": "Arabic",
    "he": "Hebrew",
    "th": "Thai",
    "hi": "Hindi",
}
"""What languages are called, by their codes: those that are told from others."""
_SCRIPTS = {
    "HANGUL": "ko",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "CJK": "zh",
    "CYRILLIC": "ru",
    "GREEK": "el",
    "ARABIC": "ar",
    "HEBREW": "he",
    "THAI": "th",
    "DEVANAGARI": "hi",
}
_ENOUGH = 2
"""Different words of another language that a line in Latin letters needs, and for each word of the expected one."""
_LONGEST = 2000
"""Characters that are looked at."""


def other_language(line: str, expected: str) -> str | None:
    """The code of the language that a line is in, where that is clearly another than the expected one; else None.

    A script stands for the language that is written in it most: Cyrillic letters for Russian. Short lines, and those in
    Latin letters of languages that are not among `NAMES`, are not told.

    >>> other_language("Der Hund ist nicht im Haus.", "en"), other_language("나는 학생입니다.", "en")
    ('de', 'ko')
    >>> other_language("The dog is not in the house.", "en"), other_language("Guten Tag", "en")
    (None, None)
    """
    line = line[:_LONGEST]
    scripts = Counter(map(_script, filter(str.isalpha, line)))
    if not scripts:
        return None
    if scripts["HIRAGANA"]:  # Japanese has Chinese characters, and Chinese has none of its own letters
        scripts["HIRAGANA"] += scripts.pop("CJK", 0) + scripts.pop("KATAKANA", 0)
    script, count = scripts.most_common(1)[0]
    if (code := _SCRIPTS.get(script)) is not None:
        return code if 2 * count > scripts.total() and not _reads(expected, script) else None
    if script != "LATIN" or expected not in NAMES:
        return None
    words = set(re.findall(r"[^\W\d_]{2,}", line.lower()))
    found = Counter(code for word in words for code in _LANGUAGES.get(word, ()))
    best = max(_WORDS, key=lambda code: found[code])
    expected_words = found[expected] if expected in _WORDS else 0
    return best if best != expected and found[best] >= _ENOUGH * max(1, expected_words) else None


@functools.lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """The first word of a letter's name, which is that of its script."""
    return unicodedata.name(letter, "").split(" ")[0].split("-")[0]


def _reads(code: str, script: str) -> bool:
    """Whether a language is written in a script, among others."""
    return _SCRIPTS.get(script) == code or (code == "ja" and script == "CJK")
