"""Read tokenizer.json, a tokenizer of the tokenizers library: how text is normalised, and cut into which pieces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from regard.errors import VocabularyError
from regard.models.language_model.saved_model import read_json
from regard.translation.tokenization import SPACE

_MODELS = "Unigram", "BPE"
_SURROGATES = re.compile("[\ud800-\udfff]")  # half a pair, which is no character


class TokenizerFile:
    """Cuts text as tokenizer.json says, but for its special tokens: a text that spells one is text.

    `ids` are those of all pieces, and `special` those of the tokens that are no text.
    """

    def __init__(self, tokenizer: Tokenizer, contents: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added = contents.get("added_tokens") or []
        self.special = frozenset(token["id"] for token in added if token.get("special"))
        pieces = (piece for piece, number in self.ids.items() if number not in self.special)
        has_bytes = contents["model"].get("byte_fallback") is True
        self.characters = None if has_bytes else frozenset("".join(pieces))

    @classmethod
    def read(cls, path: Path) -> TokenizerFile:
        """Read the file.

        Raises:
            VocabularyError: there is none, it is damaged, or of a kind that is not read: its words do not begin at "▁".
        """
        if not path.exists():
            raise VocabularyError(
                f"there is no {path.name} in {path.parent}, which says how text is cut; "
                "AutoTokenizer.from_pretrained(name).save_pretrained(folder) of transformers writes it"
            )
        contents = read_json(path)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise VocabularyError(f"{path} is truncated or no file of the tokenizers library ({error})") from None
        kind = (contents.get("model") or {}).get("type")
        first = tokenizer.pre_tokenizer.pre_tokenize_str("a b") if tokenizer.pre_tokenizer else []
        if kind not in _MODELS or [word for word, _ in first] != [SPACE + "a", SPACE + "b"]:
            raise VocabularyError(
                f"{path} cuts text by {kind} and its words begin at {first[0][0][:1] if first else 'nothing'!r}; "
                f"{' and '.join(_MODELS)} are read, with words that begin at {SPACE!r}"
            )
        return cls(tokenizer, contents)

    def words(self, text: str) -> list[str]:
        """The words of a text in the form that is cut, "▁" at the front of each."""
        tokenizer = self._tokenizer
        text = _SURROGATES.sub("\ufffd", text)
        text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text.strip())]

    def word_pieces(self, word: str) -> list[str]:
        """The pieces of a word with its "▁"."""
        return [token.value for token in self._tokenizer.model.tokenize(word)]

    def marked(self, text: str) -> tuple[int, ...]:
        """The ids of a text in which special tokens count as such, as transformers reads it."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
