"""Reading of one Python file: its bytes, its text, its suppression comments."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LARGEST = 4_000_000
"""Bytes of a file that is read."""

_MENTIONS = re.compile(
    rb"softmax|Softmax|scaled_dot_product_attention|flash_attn|MultiheadAttention|flex_attention|create_block_mask|AttentionInterface"
    rb"|ALL_ATTENTION_FUNCTIONS|nn\.Transformer|TransformerEncoder|TransformerDecoder|[Ll]inear_?[Aa]tt|padding_side"
    rb"|dot_product_attention|MultiHead(DotProduct)?Attention|GroupQueryAttention"
)
_MENTIONS_WITH_TORCH = re.compile(
    rb"multinomial|argmax|last_hidden_state|[Aa]libi|[Rr]otary|(?<![A-Za-z])(?:rope|RoPE|RoPe)(?![a-z])"
)
"""Words that other programs have too: they count in a file that names torch or transformers."""
_TORCH = re.compile(rb"torch|transformers")
_SUPPRESSION = re.compile(r"#.*?\bregard:\s*ignore(?P<file>-file)?(?:\[(?P<codes>[\w\s,]*)\])?")


class UnreadableSource(Exception):
    """A file that cannot be analyzed; the message says why.

    is_other: whether it is no fault of the file, which is a template, or written for another version of Python.
    """

    def __init__(self, message: str, *, is_other: bool = False) -> None:
        super().__init__(message)
        self.is_other = is_other


@dataclass(frozen=True, slots=True)
class Suppressions:
    """Codes that comments suppress: by line, and in the whole file; None stands for all codes."""

    lines: dict[int, frozenset[str] | None]
    everywhere: frozenset[str] | None

    def covers(self, code: str, first: int, last: int) -> bool:
        """Whether a comment on one of the lines, or for the file, suppresses the code."""
        if self.everywhere is None or code in self.everywhere:
            return True
        found = [self.lines[line] for line in (first, last) if line in self.lines]
        return any(codes is None or code in codes for codes in found)


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        UnreadableSource: the file cannot be read, or has more than `LARGEST` bytes.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise UnreadableSource(f"has {size:,} bytes, more than the {LARGEST:,} that are read; exclude it")
        return path.read_bytes()
    except OSError as error:
        raise UnreadableSource(f"cannot be read: {error.strerror or error}") from None


def mentions_attention(content: bytes) -> bool:
    """Whether a file has any of the words without which no rule applies; a file without them is not parsed."""
    if _MENTIONS.search(content) is not None:
        return True
    return _TORCH.search(content) is not None and _MENTIONS_WITH_TORCH.search(content) is not None


_OTHER_FRAMEWORK = re.compile(rb"^[ \t]*(?:import|from)[ \t]+(mlx|paddle|mindspore|mxnet)\b", re.MULTILINE)
_ATTENTION = re.compile(rb"softmax|[Aa]ttention")
_READ = re.compile(
    rb"torch|transformers|^[ \t]*(?:import|from)[ \t]+(jax|flax|tf_keras|keras|tensorflow)\b", re.MULTILINE
)


def other_framework(content: bytes) -> str:
    r"""The framework of a file with attention that no rule reads; "" for other files.

    >>> other_framework(b"import paddle\nsoftmax(x)"), other_framework(b"import mlx\nimport torch\nsoftmax(x)")
    ('paddle', '')
    """
    found = _OTHER_FRAMEWORK.search(content)
    if found is None or _READ.search(content) or not _ATTENTION.search(content):
        return ""
    return found[1].decode()


def is_test(path: str, imported: Iterable[str]) -> bool:
    """Whether a file is one of tests or benchmarks: by its folders, its name, or the modules that it imports.

    >>> is_test("project/tests/test_model.py", []), is_test("project/latest/model.py", [])
    (True, False)
    """
    return _TESTS.search(path) is not None or any(name.partition(".")[0] in ("pytest", "unittest") for name in imported)


_TESTS = re.compile(
    r"(^|/)(tests?|testing|bench|benchmarks?|benchmarking)/|(^|/)((test|bench|benchmark|compare)_[^/]*|[^/]*_(test|bench|benchmark)"
    r"|bench|benchmark|conftest)\.py$"
)


def decoded(content: bytes) -> str:
    """The text of a Python file, by its coding declaration, with line ends as they are.

    Raises:
        UnreadableSource: the content is not text of that encoding.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        reason = f"byte {error.start}: {error.reason}" if isinstance(error, UnicodeDecodeError) else str(error)
        raise UnreadableSource(f"is not text in UTF-8 or in the encoding that it declares: {reason}") from None


def encoded(text: str, content: bytes) -> bytes:
    """The bytes of a changed text, in the encoding of the file that it came from, with its byte order mark."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return text.encode(encoding)


def parsed(text: str) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        UnreadableSource: the text does not parse.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the file's strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        number = error.lineno if isinstance(error, SyntaxError) else None
        other = _other_language(text, number) if number else ""
        if other:
            raise UnreadableSource(f"is not analyzed: {other} (line {number})", is_other=True) from None
        line = f"line {number}: " if number else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error) or "expressions are nested too deeply"
        raise UnreadableSource(f"does not parse: {line}{reason}") from None


_TEMPLATE = re.compile(r"\{%[-+ ]|\{\{[-+ ]?\s*[\w.]+[^{}]*\}\}")
_OTHER_PYTHON = re.compile(
    r"^\s*(type\s+\w+\s*(\[[^]]*\]\s*)?=|(async\s+)?(def|class)\s+\w+\s*\[|except\s+[\w.]+\s*,|print\s+[^(=\s]|exec\s+[^(=\s]"
    r"|raise\s+[\w.]+\s*,|lazy\s+(import|from)\b)|(?<!\w)[tT][rR]?[\"']|<>"
)
"""Statements of Python 2, and of Python 3.12 and later, which an older Python does not parse."""


def _other_language(text: str, number: int) -> str:
    """What a text is that does not parse at a line, where that line is right in it; "" where it is none."""
    lines = text.splitlines()
    near = "\n".join(lines[max(0, number - 2) : number])
    if _TEMPLATE.search(near):
        return "it is a template, to which a program gives its values"
    if any(_OTHER_PYTHON.search(line) for line in lines[max(0, number - 1) : number]):
        return "it is written for another version of Python than {}.{}, which runs the doctor".format(*sys.version_info)
    return ""


def suppressions(text: str) -> Suppressions:
    """The suppression comments `# regard: ignore`, `# regard: ignore[ATT101]` and `# regard: ignore-file[ATT101]`.

    >>> suppressions("x = 1  # regard: ignore[ATT101, ATT111]").covers("ATT111", 1, 1)
    True
    """
    lines: dict[int, frozenset[str] | None] = {}
    everywhere: frozenset[str] | None = frozenset()
    if "regard:" not in text:
        return Suppressions(lines, everywhere)
    for number, found in _suppressing(text):
        written = found["codes"]
        codes = frozenset(written.replace(",", " ").split()) if written is not None else None
        if not found["file"]:
            lines[number] = codes
        else:
            everywhere = None if codes is None or everywhere is None else everywhere | codes
    return Suppressions(lines, everywhere)


def _suppressing(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """The comments that suppress, with their lines; up to where the text is none of tokens."""
    with contextlib.suppress(tokenize.TokenError, IndentationError):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (found := _SUPPRESSION.search(token.string)):
                yield token.start[0], found
