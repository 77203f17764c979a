"""Atlas files: JSON and named arrays in the safetensors format, with a checksum of each, memory-mapped when opened.

Records are validated when a file is opened: field types, array shapes and dtypes, masks, words, roles.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...errors import AtlasError, CheckpointError
from ...utils.safetensors_files import TensorFile, storable, write_tensors
from .attention_map import AttentionMap
from .normalizer_json import read_normalizer
from .pyramid import PyramidLevels
from .translation_info import check_translation_info, check_words

ENTRIES = {"name": str, "score": (int, float), "n": int, "rule": str}


def validated_roles(roles: Any, maps: Sequence[tuple[str, int]]) -> list[list[list[dict[str, Any]]]]:
    """Validate roles for maps of these names and numbers of heads, and return plain lists.

    Raises:
        AtlasError: they are not that.
    """
    if not _is_list(roles, len(maps)):
        raise AtlasError(f"roles need one entry for each of the {len(maps)} maps; they are {_role_size(roles)}")
    return [_of_map(of, name, heads) for of, (name, heads) in zip(roles, maps, strict=True)]


def _of_map(roles: Any, name: str, heads: int) -> list[list[dict[str, Any]]]:
    if not _is_list(roles, heads):
        raise AtlasError(
            f"the roles of {name!r} need one list for each of its {heads} heads; they are {_role_size(roles)}"
        )
    for of_head in roles:
        if not _is_list(of_head) or not all(_is_role(role) for role in of_head):
            raise AtlasError(
                f"a role of {name!r} needs to be {{'name': word, 'score': number, 'n': whole number, 'rule': word}}; "
                f"one head has {str(of_head)[:120]}"
            )
    return [[dict(role) for role in of_head] for of_head in roles]


def _is_role(role: Any) -> bool:
    return (
        isinstance(role, Mapping)
        and set(role) == set(ENTRIES)
        and all(isinstance(role[name], kind) and not isinstance(role[name], bool) for name, kind in ENTRIES.items())
        and math.isfinite(role["score"])
    )


def _is_list(value: Any, count: int | None = None) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and (count is None or len(value) == count)


def _role_size(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, Sequence) else f"a {type(value).__name__}"


Sizes: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
FLOATS = ("F16", "BF16", "F32", "F64")
COUNTS = "call", "steps", "heads", "key_heads", "queries", "keys"
WORDS = "name", "kind", "score", "operator", "prefix"
FIELDS = {
    *(*COUNTS, *WORDS, "leading", "head_axis", "scale", "softcap", "mask", "bias", "rounding"),
    *("arrays", "cell", "metrics", "tokens"),
}
OPTIONAL = {"roles", "gold", "hypotheses", "features", "normalizer"}
SCORES = "dot", "additive", "decayed dot", "weights"
MOST = 2**48
"""No count is larger: products of a few of them are still exact."""
MOST_MAPS = 2**20


def check_title(title: Any) -> None:
    """Check that the title of an atlas is a str.

    Raises:
        AtlasError: it is no word.
    """
    if not isinstance(title, str):
        _fail(f"the title of an atlas needs to be a str; it is {str(title)[:80]!r}, a {type(title).__name__}")


def check_records(records: list[Any], sizes: Sizes) -> None:
    """Check field types, counts and array shapes of all records.

    Raises:
        AtlasError: something is missing, unknown, or does not fit.
    """
    if not records:
        raise AtlasError("it has no records")
    for number, record in enumerate(records):
        try:
            _check_fields(record)
            _check_arrays(record, sizes)
            _check_words(record, sizes)
        except AtlasError as error:
            raise AtlasError(f"record {number}: {error}") from None
    if sum(_sequences(record) for record in records) > MOST_MAPS:
        raise AtlasError(f"it has more than {MOST_MAPS:,} maps")


def check_rules(records: list[dict[str, Any]], arrays: Mapping[str, Tensor]) -> None:
    """Check masks, biases and words by their first pair; faults further in are raised when they are evaluated.

    Raises:
        AtlasError: they are not to be read, or do not fit the weights.
    """
    checked: set[str] = set()
    for record in records:
        for numbers in record["tokens"].values():
            for name in {f"words.{number}" for number in numbers or ()} - checked:
                _check_ends(name, arrays)
                checked.add(name)
        check_words(record, arrays)
        if record["score"] == "weights" or (record["mask"] is None and record["bias"] is None):
            continue
        one = slice(0, 1)
        first = AttentionMap(record, arrays, 0)
        first.exists(0, one, one)
        first.weights(0, one, one)


def _check_fields(record: Any) -> None:
    if not isinstance(record, dict) or not FIELDS <= set(record) <= FIELDS | OPTIONAL:
        given = sorted(map(str, record))[:30] if isinstance(record, dict) else type(record).__name__
        _fail(f"it has {given}; it needs {sorted(FIELDS)}")
    for name in COUNTS:
        if not _is_count(record[name], least=0 if name == "call" else 1):
            _fail(f"{name!r} is {str(record[name])[:80]!r}; it needs a whole number")
    for name in WORDS:
        if not isinstance(record[name], str):
            _fail(f"{name!r} is {str(record[name])[:80]!r}; it needs a word")
    if record["kind"] not in ("self", "cross") or record["score"] not in SCORES:
        _fail(f"its kind {record['kind'][:80]!r} or its score {record['score'][:80]!r} is not known")
    if "normalizer" not in record:
        read_normalizer(record, {})
    for name in ("leading", "cell"):
        if not isinstance(record[name], list) or not all(_is_count(item) for item in record[name]):
            _fail(f"{name!r} is {str(record[name])[:80]!r}; it needs whole numbers of at least 1")
    for name in ("scale", "rounding", *(["softcap"] if record["softcap"] is not None else [])):
        if not _is_number(record[name]):
            _fail(f"{name!r} is {str(record[name])[:80]!r}; it needs a finite number")
    if not isinstance(record["head_axis"], bool) or record["heads"] % record["key_heads"]:
        _fail("head_axis needs to be true or false, and the key heads to divide the heads")
    leading = record["leading"]
    if record["head_axis"] and (not leading or leading[-1] != record["heads"]):
        _fail(f"its leading axes {leading[:9]} need to end with its {record['heads']} heads")
    if not record["head_axis"] and record["heads"] != 1:
        _fail(f"it has {record['heads']} heads without an axis for them")
    if record["softcap"] is not None and record["softcap"] <= 0:
        _fail(f"its softcap is {record['softcap']}; it needs a number above 0")


def _check_arrays(record: dict[str, Any], sizes: Sizes) -> None:
    batch, heads, queries, keys = _sequences(record), record["heads"], record["queries"], record["keys"]
    named = record["arrays"]
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        _fail("'arrays' needs the names of arrays")
    if record["score"] == "weights":
        needed = {"weights": (("F16",), (batch, heads, queries, keys))}
    else:
        dim = _dim(named, sizes)
        needed = {
            "query": (FLOATS, (batch, heads, queries, dim)),
            "key": (FLOATS, (batch, record["key_heads"], keys, dim)),
            "lse": (("F32", "F64"), (batch, heads, queries)),
        }
        if record["score"] == "decayed dot":
            _check_features(record, queries, keys, dim)
        if record["score"] == "additive":
            needed["weight"] = FLOATS, (dim,)
        if "norms" in named:
            needed["norms"] = ("F32",), (batch, heads, keys)
        if {"query_positions", "key_positions"} & set(named):
            for name, length in (("query_positions", queries), ("key_positions", keys)):
                several = _shape(named.get(name), sizes)[:1] == (batch,)
                needed[name] = ("I64",), (batch if several else 1, length)
    if set(named) != set(needed):
        _fail(f"it has the arrays {sorted(named)[:20]}; it needs {sorted(needed)}")
    for name, (dtypes, shape) in needed.items():
        _check_size(named[name], dtypes, shape, sizes)
    if "query" in needed and sizes[named["query"]][0] != sizes[named["key"]][0]:
        _fail("query and key need one dtype")
    _check_summary(record, (batch, heads, queries, keys), sizes)


def _check_features(record: dict[str, Any], queries: int, keys: int, dim: int) -> None:
    """Check that queries and keys are of one sequence, and have features and one or as many decays, in two terms."""
    features = record.get("features")
    if queries != keys or not isinstance(features, int) or features < 1 or dim not in (features + 2, 3 * features):
        _fail(
            f"a score with decay has {features!r} features in {dim} columns for {queries} queries and {keys} keys; it "
            "needs as many queries as keys, and two columns for each decay"
        )


def _check_summary(record: dict[str, Any], shape: tuple[int, int, int, int], sizes: Sizes) -> None:
    """Check the sizes of pyramid, profiles and metrics."""
    batch, heads, queries, keys = shape
    if len(record["cell"]) != 2:
        _fail("'cell' needs two numbers")
    names = record["metrics"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        _fail("'metrics' needs different words")
    prefix, levels = record["prefix"], PyramidLevels(queries, keys, *record["cell"])
    for level, cells in enumerate(levels.shapes):
        for reduce in ("max", "mean"):
            _check_size(f"{prefix}{reduce}.{level}", ("U8",), (batch, heads, *cells), sizes)
    for name, last in (
        ("tops", 2 * len(levels.shapes)),
        ("entropy", queries),
        ("received", keys),
        ("metrics", len(names)),
        ("largest", queries),
    ):
        _check_size(prefix + name, ("F32",), (batch, heads, last), sizes)


def _check_words(record: dict[str, Any], sizes: Sizes) -> None:
    batch = _sequences(record)
    tokens = record["tokens"]
    if not isinstance(tokens, dict) or set(tokens) != {"query", "key"}:
        _fail("'tokens' needs the words of query and key")
    for side, count in (("query", record["queries"]), ("key", record["keys"])):
        numbers = tokens[side]
        if numbers is None:
            continue
        if not isinstance(numbers, list) or len(numbers) != batch or not all(_is_count(n, least=0) for n in numbers):
            _fail(f"the words of its {side} need {batch} numbers of lists")
        for number in set(numbers):
            _check_size(f"words.{number}.ends", ("I64",), (count + 1,), sizes)
            _check_size(f"words.{number}", ("U8",), _shape(f"words.{number}", sizes)[:1], sizes)
            if f"words.{number}.numbers" in sizes:
                _check_size(f"words.{number}.numbers", ("I32",), (count,), sizes)
    if "roles" in record:
        validated_roles(record["roles"], [(record["name"][:80], record["heads"])] * batch)
    check_translation_info(record, batch)


def _check_ends(name: str, arrays: Mapping[str, Tensor]) -> None:
    ends = arrays[f"{name}.ends"]
    if int(ends[0]) != 0 or int(ends[-1]) != len(arrays[name]) or bool((ends[1:] < ends[:-1]).any()):
        _fail(f"the words {name!r} end where there are no bytes")


def _check_size(name: Any, dtypes: tuple[str, ...], shape: tuple[int, ...], sizes: Sizes) -> None:
    if not isinstance(name, str) or name not in sizes:
        _fail(f"the array {str(name)[:80]!r} is not there")
    dtype, has = sizes[name]
    if dtype not in dtypes or has != shape:
        _fail(f"the array {name[:80]!r} is {dtype} {has}; it needs to be {' or '.join(dtypes)} {shape}")


def _shape(name: Any, sizes: Sizes) -> tuple[int, ...]:
    """The shape of an array; (0,) if it does not exist."""
    return sizes[name][1] if isinstance(name, str) and name in sizes else (0,)


def _dim(named: dict[str, Any], sizes: Sizes) -> int:
    shape = _shape(named.get("query"), sizes)
    return shape[-1] if shape else 0


def _sequences(record: dict[str, Any]) -> int:
    leading = record["leading"][:-1] if record["head_axis"] else record["leading"]
    count = math.prod(leading)
    if count > MOST:
        _fail(f"its leading axes {leading[:9]} are too long")
    return count


def _is_count(value: Any, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= 2.0**1000 if isinstance(value, int) else math.isfinite(value)


def _fail(what: str) -> NoReturn:
    raise AtlasError(what)


FORMAT = "regard-atlas"
VERSION = 1
"""The version of the layout, raised when an older regard could not read the file."""
ENTRY = "atlas"
"""The entry of the file's metadata that holds the JSON text."""
CHECKSUM = "crc32"
"""The entry of the file's metadata that holds the checksum of the JSON text; arrays have theirs in the text."""
EXTRA = "explorer"
"""The extra of regard that installs safetensors."""
LONGEST_HEADER = 2**25
"""The most bytes that the header of an atlas may have; it is parsed as a whole."""
CHECKED_AT_ONCE = 2**25
"""Files of at most this many bytes are verified when they are opened, in some 35 ms; larger ones array by array."""


def save_atlas(path: Path, title: str, records: Sequence[Mapping[str, Any]], arrays: Mapping[str, Tensor]) -> None:
    """Write title, records and arrays to one file, replacing it in one step.

    Raises:
        AtlasError: it cannot be written, or an array comes from a file that is damaged.
    """
    tensors = storable({name: arrays[name] for name in arrays})
    head = {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "records": list(records),
        "checksums": {name: checksum(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(head, allow_nan=False, ensure_ascii=False)
    try:
        write_tensors(path, tensors, {ENTRY: text, CHECKSUM: str(zlib.crc32(_utf8(text)))}, EXTRA)
    except CheckpointError as error:
        raise AtlasError(str(error)) from error


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a contiguous tensor.

    >>> checksum(torch.tensor([49, 50, 51], dtype=torch.uint8)) == zlib.crc32(b"123")
    True
    """
    if not tensor.numel():
        return 0
    raw: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw.data)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class MappedArrays(Mapping[str, Tensor]):
    """The arrays of an open file by name: views of the mapped file, each verified when it is first read.

    Raises:
        AtlasError: on reading an array whose bytes do not have the checksum that was stored with them.
    """

    def __init__(self, path: Path, file: TensorFile, checksums: Mapping[str, int]) -> None:
        self._path, self._file, self._checksums = path, file, checksums
        self._verified: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._verified:
            tensor = self.unverified(name)
            if checksum(tensor) != self._checksums[name]:
                raise AtlasError(damaged(self._path, f"the array {name[:80]!r}"))
            self._verified[name] = tensor
        return self._verified[name]

    def unverified(self, name: str) -> Tensor:
        """An array whose bytes are not read before its values are."""
        if name not in self._checksums:
            raise KeyError(name)
        return self._file.mapped(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checksums)

    def __len__(self) -> int:
        return len(self._checksums)


class UnverifiedArrays(Mapping[str, Tensor]):
    """The same arrays without verification, for checks that must not read a large file as a whole."""

    def __init__(self, arrays: MappedArrays) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Tensor:
        return self._arrays.unverified(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def damaged(path: Path, part: str) -> str:
    """The error message for bytes of a file whose checksum differs from the stored one."""
    return (
        f"{path} is damaged: {part} does not have the checksum that was stored with it, so that some of its bytes have "
        "changed since it was written; copy the file again, or record the model again"
    )


def open_atlas(path: Path) -> tuple[str, list[dict[str, Any]], Mapping[str, Tensor]]:
    """Title, records and memory-mapped arrays of a file.

    Raises:
        AtlasError: it is missing, truncated, of a newer version, no atlas, damaged or inconsistent.
    """
    try:
        file = TensorFile(path, extra=EXTRA, kind="an atlas", longest_header=LONGEST_HEADER)
    except CheckpointError as error:
        raise AtlasError(str(error)) from None
    sizes: Sizes = {name: (file.dtypes[name], file.shapes[name]) for name in sorted(file.shapes)}
    head = _parse_head(path, file.metadata)
    _check_checksums(path, head, sizes)
    arrays = MappedArrays(path, file, head["checksums"])
    try:
        check_records(head["records"], sizes)
    except AtlasError as error:
        raise AtlasError(f"{path} is inconsistent: {error}") from None
    if file.nbytes <= CHECKED_AT_ONCE:
        for name in arrays:
            arrays[name]
    try:
        check_rules(head["records"], UnverifiedArrays(arrays))
    except AtlasError as error:
        raise AtlasError(f"{path} is inconsistent: {error}") from None
    return head["title"], head["records"], arrays


def _parse_head(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The JSON text of a file: format, version, title, records and checksums."""
    text = metadata.get(ENTRY)
    if text is None:
        raise AtlasError(f"{path} is a safetensors file, but no atlas: it has no entry {ENTRY!r}")
    try:
        head = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise AtlasError(f"{path} is inconsistent: its entry {ENTRY!r} is no JSON ({str(error)[:100]})") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise AtlasError(f"{path} is a safetensors file, but no atlas: its entry {ENTRY!r} is of another format")
    version = head.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise AtlasError(f"{path} is inconsistent: its version is {str(version)[:80]!r}, and needs to be {VERSION}")
    if version > VERSION:
        raise AtlasError(f"{path} is an atlas of version {version}; this regard reads {VERSION}: install a newer one")
    if not isinstance(head.get("title"), str) or not isinstance(head.get("records"), list):
        raise AtlasError(f"{path} is inconsistent: it needs a title and a list of records")
    if metadata.get(CHECKSUM) != str(zlib.crc32(_utf8(text))):
        raise AtlasError(damaged(path, f"its entry {ENTRY!r}"))
    return head


def _check_checksums(path: Path, head: Mapping[str, Any], sizes: Sizes) -> None:
    found = head.get("checksums")
    if not isinstance(found, dict) or set(found) != set(sizes) or not all(type(sum_) is int for sum_ in found.values()):
        raise AtlasError(f"{path} is inconsistent: it needs a checksum, a whole number, of each of its arrays")


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
