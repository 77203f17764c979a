"""Files from strangers: each either opens and behaves, or is refused with an AtlasError, in little memory."""

import contextlib
import copy
import json
import random
import resource
import zlib

import pytest
import torch
from torch import nn

import regard
from regard import biases, masks
from regard.errors import AtlasError
from regard.explorer import Atlas, RankedTranslation, TokenizedText, record

ROOM = 2**31
"""How much more address space the tests may take than before; a header that is believed asks for far more."""
HOSTILE = [
    *(None, True, False, 0, 1, -1, 3, 64, 2**31, 2**40, 2**53, 2**62, 10**30, 0.5, -0.0, 1e300),
    *("", "x", "dot", "weights", "cross", "query", "0.query", "0.max.0", "shared.0", "../../etc/passwd", "é" * 999),
    *([], [0], [1, 1], [10**9, 10**9], [[]], {}, {"is": "causal"}, {"is": "not", "mask": None}, {"array": "0.query"}),
    *(
        {"array": "0.key_positions"},
        {"is": "window", "before": 2**53, "after": -(2**53)},
        {"is": "prefix", "length": 2},
    ),
    *({"is": "random_blocks", "length": 2**50, "block": 1, "number": 1, "seed": 0, "heads": None},),
    *({"is": "random_blocks", "length": 64, "block": 9, "number": 99, "seed": -1, "heads": 3},),
    *({"is": "strided", "stride": 0}, {"is": "padding", "lengths": {"array": "0.lse"}}, {"is": "alibi", "slopes": 3}),
    *({"is": "documents", "ids": {"array": "0.lse"}}, {"is": "where", "pairs": {"array": "0.query"}}),
    *({"is": "block_layout", "blocks": {"array": "shared.0"}, "lengths": [0, 0], "size": [0, 0]},),
]


class Asker(nn.Module):
    def forward(self, *tensors, **options):
        return regard.attention(*tensors, **options)


def saved(path, atlas):
    atlas.save(path)
    return path.read_bytes()


def recorded(path, n, words=None, **options):
    query, key = torch.randn(2, 4, n, 8), torch.randn(2, 2, n, 8)
    with record(Asker()) as recording:
        recording.model(query, key, key, **options)
    return saved(path, recording.atlas(tokens=words))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Atlases of all kinds, as bytes."""
    path = tmp_path_factory.mktemp("fuzz") / "a.atlas"
    torch.manual_seed(0)
    documents = masks.documents(torch.arange(20).expand(2, 20) // 7)
    spread = torch.randn(2, 3, 20, 20).softmax(-1)
    role = {"name": "a", "score": 1.0, "n": 2, "rule": "b"}
    atlas = Atlas.from_weights({"a": spread}).with_roles([[[role], [], []]] * 2)
    pieces = TokenizedText([str(n) for n in range(20)], [n // 2 for n in range(20)]), TokenizedText(["a", "b", "c"])
    pair = Atlas.from_weights({"cross": torch.full((2, 1, 20, 3), 1 / 3)}, tokens=pieces)
    pair = pair.with_hypotheses([RankedTranslation(0, "a", -1.5), RankedTranslation(1, "b", -2.0)]).with_gold("0-0 2?9")
    return [
        recorded(path, 20, [str(n) for n in range(20)], mask=masks.causal() & documents, bias=biases.alibi(4)),
        recorded(path, 150, mask=masks.where(keep=torch.rand(2, 1, 150, 150) > 0.4), softcap=2.0),
        recorded(path, 20, mask=masks.random_blocks(20, 4, 2) | masks.padding(lengths=torch.tensor([3, 9]))),
        recorded(path, 20, bias=torch.randn(4, 20, 20), query_positions=torch.arange(20) + 3),
        saved(path, atlas),
        saved(path, pair),
    ]


@pytest.fixture(autouse=True)
def little_memory():
    """An end to the address space."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def behaves(path, data):
    """Whether a file opens; everything in it is asked for, and what is wrong with it may only be an AtlasError."""
    path.unlink(missing_ok=True)  # a file that is written over waits for the disk
    path.write_bytes(data)
    try:
        atlas = Atlas.open(path)
    except AtlasError:
        return False
    for shown in atlas.maps[:3]:
        asks = [
            lambda shown=shown: (shown.query_tokens, shown.key_tokens, shown.query_positions, shown.key_positions),
            lambda shown=shown: (shown.query_words, shown.key_words, shown.gold, shown.hypothesis),
            lambda shown=shown: (shown.metrics, shown.roles, shown.rounding, repr(shown)),
            lambda shown=shown: [shown.pooled(0, level, "max") for level in range(len(shown.levels))],
            lambda shown=shown: (shown.entropy(shown.heads - 1), shown.received(0), shown.largest(0)),
            lambda shown=shown: shown.weights(0, slice(0, min(shown.queries, 256)), slice(0, min(shown.keys, 256))),
            lambda shown=shown: shown.exists(shown.heads - 1, slice(shown.queries - 1, shown.queries), slice(0, 1)),
        ]
        for ask in asks:
            try:
                ask()
            except AtlasError:
                continue
    return True


def taken_apart(data):
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["atlas"]), data[8 + length :]


def checksums(header, rest):
    """Of the bytes of each array, as the header has them; 0 where it has none that could be read."""
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: zlib.crc32(rest[slice(*span)]) for name, span in spans.items()}


def put_together(header, head, rest):
    """A file of these parts, with the checksums that they have."""
    if isinstance(head, dict) and "checksums" in head:
        head = {**head, "checksums": checksums(header, rest)}
    text = head if isinstance(head, str) else json.dumps(head)
    header = {**header, "__metadata__": {"atlas": text, "crc32": str(zlib.crc32(text.encode()))}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rest


def places(value, path=()):
    """The way to every value in a tree of JSON."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def edited(tree, path, value):
    """A copy of a tree with one value replaced; `...` takes it out."""
    if not path:
        return value
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return tree


def test_all_of_them_open(files, tmp_path):
    assert all(behaves(tmp_path / "a.atlas", data) for data in files)


def test_truncated(files, tmp_path):
    for data in files:
        for length in {0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, *range(0, len(data), len(data) // 12)}:
            assert not behaves(tmp_path / "a.atlas", data[:length])


def test_bits_flipped(files, tmp_path):
    dice = random.Random(1)
    opened = 0
    for data in files:
        ends = int.from_bytes(data[:8], "little") + 8
        for number in range(60):
            wrong = bytearray(data)
            for _ in range(dice.choice([1, 1, 5])):
                at = dice.randrange(ends if number % 3 else len(data))
                wrong[at] ^= 1 << dice.randrange(8)
            assert not behaves(tmp_path / "a.atlas", bytes(wrong))
            if number % 3 == 0:  # the same with checksums that fit: some bits are numbers like any other
                with contextlib.suppress(ValueError, KeyError):
                    opened += behaves(tmp_path / "a.atlas", put_together(*taken_apart(bytes(wrong))))
    assert opened


def test_words_of_the_json_edited(files, tmp_path):
    dice = random.Random(2)
    count = opened = 0
    for data in files:
        header, head, rest = taken_apart(data)
        for path in list(places(head)):
            for value in [..., *dice.sample(HOSTILE, 4)] if path else dice.sample(HOSTILE, 4):
                opened += behaves(tmp_path / "a.atlas", put_together(header, edited(head, path, value), rest))
                count += 1
    assert count > 800
    assert opened < count / 2


def test_sizes_of_arrays_edited(files, tmp_path):
    dice = random.Random(3)
    for data in files:
        header, head, rest = taken_apart(data)
        names = [name for name in header if name != "__metadata__"]
        for name in names:
            shape = header[name]["shape"]
            for wrong in ([], [0], [*shape, 1], [*shape[::-1], 2], [2**40, 0], [2**62] * 2, [1, *shape]):
                entry = {**header[name], "shape": wrong}
                behaves(tmp_path / "a.atlas", put_together({**header, name: entry}, head, rest))
            other = dice.choice(names)
            behaves(tmp_path / "a.atlas", put_together({**header, name: header[other]}, head, rest))
            gone = {key: value for key, value in header.items() if key != name}
            behaves(tmp_path / "a.atlas", put_together(gone, head, rest))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("{", "its entry 'atlas' is no JSON"),
        ("[" * 100_000, "its entry 'atlas' is no JSON"),
        ('{"format": NaN}', "NaN is no number"),
        ('{"format": "another"}', "its entry 'atlas' is of another format"),
        ("3", "its entry 'atlas' is of another format"),
        ('{"format": "regard-atlas", "version": "1"}', "its version is '1', and needs to be 1"),
        ('{"format": "regard-atlas", "version": 2}', "is an atlas of version 2; this regard reads 1: install a newer"),
        ('{"format": "regard-atlas", "version": 1}', "it needs a title and a list of records"),
        (
            '{"format": "regard-atlas", "version": 1, "title": "", "records": []}',
            "it needs a checksum, a whole number,",
        ),
        ({"format": "regard-atlas", "version": 1, "title": "", "records": [], "checksums": {}}, "it has no records"),
    ],
)
def test_what_the_text_has_to_be(head, message, files, tmp_path):
    header, _, rest = taken_apart(files[0])
    (tmp_path / "a.atlas").write_bytes(put_together(header, head, rest))
    with pytest.raises(AtlasError, match=message):
        Atlas.open(tmp_path / "a.atlas")


CHANGES = {
    r"record 0: it has \['arrays'.*; it needs": (("records", 0, "name"), ...),
    r"record 0: 'queries' is '-1'; it needs a whole number": (("records", 0, "queries"), -1),
    r"record 0: 'name' is '3'; it needs a word": (("records", 0, "name"), 3),
    r"record 0: its kind 'x' or its score": (("records", 0, "kind"), "x"),
    r"record 0: 'scale' is '\[\]'; it needs a finite number": (("records", 0, "scale"), []),
    r"record 0: a score with decay has None features in \d+ columns": (("records", 0, "score"), "decayed dot"),
    r"record 0: its softcap is -2": (("records", 0, "softcap"), -2),
    r"record 0: its leading axes \[2\] need to end with its 4 heads": (("records", 0, "leading"), [2]),
    r"record 0: head_axis needs to be true or false, and the key heads": (("records", 0, "key_heads"), 3),
    r"record 0: it has 4 heads without an axis": (("records", 0, "head_axis"), False),
    r"record 0: the array '0.query' is F16 \(2, 4, 20, 8\); it needs to be": (("records", 0, "queries"), 21),
    r"record 0: it has the arrays \['key', 'query'\]; it needs": (("records", 0, "arrays", "lse"), ...),
    r"record 0: the array '9.max.0' is not there": (("records", 0, "prefix"), "9."),
    r"record 0: the array '0.max.0' is U8": (("records", 0, "cell"), [2, 2]),
    r"record 0: 'metrics' needs different words": (("records", 0, "metrics"), ["a", "a"]),
    r"record 0: the words of its key need 2 numbers of lists": (("records", 0, "tokens", "key"), [0]),
    r"record 0: roles need one entry for each of the 2 maps": (("records", 0, "roles"), []),
    r"record 0: its gold links need to be those of cross-attention": (("records", 0, "gold"), [None, None]),
    r"record 0: hypotheses need one entry for each of the 2 maps; they are 1": (("records", 0, "hypotheses"), [None]),
    r"the atlas names 'ceasal', which is unknown here": (("records", 0, "mask"), {"is": "ceasal"}),
    r"'causal' in the atlas has \['a', 'is'\]; it needs": (("records", 0, "mask"), {"is": "causal", "a": 1}),
    r"'prefix' in the atlas needs whole numbers, arrays or masks": (
        ("records", 0, "mask"),
        {"is": "prefix", "length": 0.5},
    ),
    r"refers to the array 'x', which is not there": (("records", 0, "bias", "slopes"), {"array": "x"}),
    r"'alibi' in the atlas needs arrays as \['slopes'\]": (("records", 0, "bias", "slopes"), 3),
    r"'strided' in the atlas needs 'stride' of at least 1": (("records", 0, "mask"), {"is": "strided", "stride": 0}),
    r"the mask, bias or positions .* do not fit": (("records", 0, "bias", "slopes"), {"array": "0.query"}),
}


@pytest.mark.parametrize("message", CHANGES)
def test_what_is_inconsistent(message, files, tmp_path):
    header, head, rest = taken_apart(files[0])
    path, value = CHANGES[message]
    (tmp_path / "a.atlas").write_bytes(put_together(header, edited(head, path, value), rest))
    with pytest.raises(AtlasError, match=message):
        Atlas.open(tmp_path / "a.atlas")


def test_a_long_header_is_not_read(tmp_path):
    path = tmp_path / "a.atlas"
    with path.open("wb") as file:
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**31)  # a sparse file
    with pytest.raises(AtlasError, match=r"has a header of 1,073,741,824 bytes; an atlas has at most"):
        Atlas.open(path)


def test_other_files(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(AtlasError, match="is a safetensors file, but no atlas: it has no entry 'atlas'"):
        Atlas.open(tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("some words that are no atlas at all")
    with pytest.raises(
        AtlasError, match=r"is not a whole safetensors file \(it has 35 bytes, and its header alone says"
    ):
        Atlas.open(tmp_path / "text")
