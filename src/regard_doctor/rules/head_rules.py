"""Rules about axes: how heads are split and merged, in which order they are repeated, which axis is the batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..array_frameworks import KERAS_LAYERS
from ..attention_sites import AttentionSite, equation_axes
from ..finding import Severity
from ..module_facts import ModuleFacts
from ..python_syntax import code_of
from ..term import ABSENT, Term, exchanges_middle, is_none, is_true, lineage, moved_axes, number, same, through, walk
from .base import Report, rule

_HEADS = re.compile(r"head|^h$|^H$|^nh$|^n_h$", re.I)
_BATCH = re.compile(r"^(b|bs|bsz|bsize|batch|batch_size|n_batch|nbatches|batch_dim)$", re.I)
_LENGTH = re.compile(
    r"^(t|l|s|n|seq|seq_?len(gth)?|length|len|n_?tokens|tokens|num_tokens|tgt_len|src_len|steps|time|count|items|num_\w+)$",
    re.I,
)
_LAYERS = (
    *("torch.nn.TransformerEncoder", "torch.nn.TransformerEncoderLayer", "torch.nn.TransformerDecoder"),
    *("torch.nn.TransformerDecoderLayer", "torch.nn.Transformer", "torch.nn.MultiheadAttention"),
)


@rule("ATT401", Severity.ERROR)
def heads_split_across_positions(facts: ModuleFacts) -> Iterator[Report]:
    """Heads are split off by a reshape alone, so that each head gets other positions instead of other features."""
    for operand in (one for site in _sites_with_heads(facts) for one in (site.query, site.key, site.value)):
        folded = _folded_at_once(operand)
        for reshape, to in ((_split(operand), "batch, heads"), (folded, "batch · heads")):
            if reshape is not None:
                yield Report(
                    reshape.node,
                    f"this reshape of (batch, length, heads · dim) to ({to}, length, dim) mixes positions with "
                    "heads: view as (batch, length, heads, dim), then transpose(1, 2)",
                )


def _folded_at_once(operand: Term) -> Term | None:
    """The reshape of a projection to (batch · heads, length, dim) with no axes moved between, if there is one."""
    operand = through(operand, "cast", "dropout", "carried", "mul", "div", "transpose")
    sizes = _spelled_sizes(operand)
    rows = [one.strip() for one in sizes[0].split("*")] if operand.op == "reshape" and len(sizes) == 3 else []
    folded = len(rows) > 1 and any(map(_HEADS.search, rows)) and any(map(_BATCH.match, rows))
    return operand if folded and operand.input.applies("torch.nn.Linear") else None


def _sites_with_heads(facts: ModuleFacts) -> Iterator[AttentionSite]:
    return (site for site in facts.sites if site.kind in ("formula", "sdpa", "flex"))


def _split(operand: Term) -> Term | None:
    """The reshape into four axes, heads first, of a linear projection with no axes moved between."""
    *_, reshape = lineage(operand, *_MOVED_OR_CUT)
    four = reshape.op == "reshape" and len(reshape.items) == 4
    source = through(reshape.input, "cast", "dropout", "carried", "element")
    return reshape if four and source.applies("torch.nn.Linear") and _is_head_first(reshape) else None


_MOVED_OR_CUT = (
    *("cast", "dropout", "carried", "mul", "div", "transpose", "permute", "choice", "element", "chunk", "split"),
)


def _spelled_sizes(reshape: Term) -> list[str]:
    """How the sizes of a reshape are written, there or where a variable got them."""
    if not isinstance(reshape.node, ast.Call):
        return []
    named = (one.value for one in reshape.node.keywords if isinstance(one.value, ast.Tuple | ast.List))
    written = [*reshape.node.args, *named]
    if len(written) in (1, 2) and isinstance(written[-1], ast.Tuple | ast.List):
        written = written[-1].elts
    if len(written) == 1 and len(reshape.items) > 1:
        return [code_of(one.node) for one in reshape.items]
    return [ast.unparse(one) for one in written]


def _names_of_sizes(reshape: Term) -> list[str]:
    """The last names of four spelled sizes; none of another number of sizes."""
    sizes = [size.rpartition(".")[2] for size in _spelled_sizes(reshape)]
    return sizes if len(sizes) == 4 else []


def _counts_heads(size: str) -> bool:
    return _HEADS.search(size) is not None and "dim" not in size


def _is_head_first(reshape: Term) -> bool:
    sizes = _names_of_sizes(reshape)
    if not sizes or number(reshape.items[2]) == 1:
        return False
    features = re.search(r"dim|^(d|hd|hs|dk|d_k|d_v|d_head)$", sizes[2])
    return _counts_heads(sizes[1]) and not features and not _HEADS.search(sizes[2])


@rule("ATT402", Severity.ERROR)
def heads_merged_across_positions(facts: ModuleFacts) -> Iterator[Report]:
    """Heads are merged by a reshape without moving their axis back behind the positions."""
    for site in filter(_keeps_axes, _sites_with_heads(facts)):
        if not _is_transposed_from_positions(site.query):
            continue
        for reshape in _direct_reshapes(site.output, facts):
            sizes = _spelled_sizes(reshape)
            if len(sizes) == 3 and not any(_HEADS.fullmatch(size.rpartition(".")[2]) for size in sizes):
                yield Report(
                    reshape.node,
                    "this reshape of (batch, heads, length, dim) to (batch, length, heads · dim) mixes heads with "
                    "positions: transpose(1, 2) first",
                )
    for site in filter(_keeps_axes, _sites_with_heads(facts)):
        folded = _folded_rows(site.query)
        for reshape in _direct_reshapes(site.output, facts) if folded is not None else ():
            if len(reshape.items) == 3 and not same(reshape.items[0], folded) and number(reshape.items[0]) != -1:
                yield Report(
                    reshape.node,
                    "this reshape of (batch · heads, length, dim) to (batch, length, heads · dim) mixes heads with "
                    "positions: view as (batch, heads, length, dim), then transpose(1, 2)",
                )


def _folded_rows(query: Term) -> Term | None:
    """The size batch · heads, where (batch, heads, length, dim) was reshaped to three axes, heads next to the batch."""
    query = through(query, "cast", "dropout", "mul", "div", "carried")
    if query.op != "reshape" or len(query.items) != 3 or query.items[0].op != "mul":
        return None
    return query.items[0] if _is_transposed_from_positions(query.input) else None


def _is_transposed_from_positions(query: Term) -> bool:
    """Whether a query was viewed as (batch, length, heads, dim) and then transposed to (batch, heads, length, dim)."""
    query = through(query, "cast", "dropout", "mul", "div", "carried")
    if exchanges_middle(query):
        return query.input.op == "reshape" and len(query.input.items) == 4
    if query.op != "element":
        return False
    if query.input.op in ("chunk", "split") and number(query.input["dim"]) == -1:
        return _is_transposed_from_positions(query.input.input)
    moved = through(query.input, "unbind")  # of q, k and v from one projection, heads before positions
    return moved_axes(moved) == [2, 0, 3, 1, 4] and moved.input.op == "reshape" and len(moved.input.items) == 5


def _keeps_axes(site: AttentionSite) -> bool:
    """Whether the output has the order of axes of the query."""
    if site.output.op != "einsum":
        return True
    axes = equation_axes(site.output)
    return axes is not None and len(axes[2]) == 4 and axes[2][:3] == axes[0][:3]


def _direct_reshapes(term: Term, facts: ModuleFacts) -> Iterator[Term]:
    for consumer in facts.uses(term):
        if consumer.op == "reshape" and consumer.input is term:
            yield consumer
        elif consumer.op in ("cast", "dropout", "choice") and consumer is not term:
            yield from _direct_reshapes(consumer, facts)


@rule("ATT403", Severity.ERROR)
def tiled_heads(facts: ModuleFacts) -> Iterator[Report]:
    """Keys of grouped heads are tiled instead of repeated, so that query heads get keys of other groups."""
    for site in _sites_with_heads(facts):
        for operand in (site.key, site.value):
            for one in walk(operand, stop=frozenset({"apply", "call", "method"})):
                if _repeats_positions(one):
                    yield Report(one.node, "this repeats positions, and not key heads: their axis is the next one")
                elif (one.op == "repeat" and _tiles_heads(one)) or _is_concatenated(one) or _groups_first(one):
                    yield Report(
                        one.node,
                        "this tiles the key heads as 0 1 0 1, and query heads are grouped as 0 0 1 1: "
                        "use repeat_interleave, or enable_gqa=True of scaled_dot_product_attention",
                    )


def _repeats_positions(repeat: Term) -> bool:
    """Whether keys of (batch, length, heads, dim), by the names of their sizes, are repeated along the positions."""
    along = repeat.op == "repeat_interleave" and number(repeat["dim"]) == 1 and repeat.input.op == "reshape"
    sizes = _names_of_sizes(repeat.input) if along else []
    return bool(sizes) and bool(_LENGTH.match(sizes[1])) and _counts_heads(sizes[2])


def _is_concatenated(joined: Term) -> bool:
    """Whether keys are joined with themselves along the heads: `cat([k] * groups, dim=1)`."""
    along = joined.op == "cat" and joined["tensors"].op == "mul" and number(joined["dim"]) == 1
    return along and any(one.op == "tuple" and len(one.items) == 1 for one in joined["tensors"].operands())


def _groups_first(merged: Term) -> bool:
    """Whether the groups are inserted before the heads, `k[:, None].expand(b, groups, heads, n, d)`, and merged so."""
    expanded, sizes = merged.input, _spelled_sizes(merged)
    keeps_rows = number(merged.get("start_dim")) == 1 if merged.op == "flatten" else len(sizes) == 4
    if merged.op not in ("reshape", "flatten") or not keeps_rows or expanded.op not in ("expand", "repeat"):
        return False
    if len(expanded.items) != 5 or (merged.op == "reshape" and re.search(r"\*|-1", sizes[0])):  # of rows and beams
        return False
    inner = expanded.input
    if inner.op == "unsqueeze":
        inserted = number(inner.get("dim"))
    else:
        axes = [is_none(one) for one in inner.items] if inner.op == "item" else []
        inserted = axes.index(True) if axes.count(True) == 1 else None
    next_axis = _spelled_sizes(expanded)[3].rpartition(".")[2]
    heads_last = bool(_HEADS.search(next_axis)) and "dim" not in next_axis
    return inserted in (1, -4) or (inserted in (2, -3) and heads_last)


def _tiles_heads(repeat: Term) -> bool:
    sizes, inner = _spelled_sizes(repeat), repeat.input
    many = [index for index, size in enumerate(sizes) if size != "1"]
    if len(sizes) != 4 or many not in ([1], [2]):
        return False
    inserted = inner.op == "item" and len(inner.items) > many[0] and is_none(inner.items[many[0]])
    of_one = inner.op in ("transpose", "reshape") and 1 in map(number, (*inner.items, *inner.input.items))
    one_head = inserted or of_one or inner.op == "unsqueeze"
    return not one_head and bool(re.search(r"//|rep|group|kv", sizes[many[0]], re.I))


@rule("ATT404", Severity.ERROR)
def batch_as_sequence(facts: ModuleFacts) -> Iterator[Report]:
    """A module of torch that expects (length, batch, dim) gets (batch, length, dim): it attends across the batch."""
    unpacked = (one.term for one in facts.operations("unpack") if len(one.term.value) in (2, 3))
    named = (one for one in unpacked if _BATCH.match(one.value[0]) and _LENGTH.match(one.value[1]))
    batch_first = {id(one.input) for one in named}
    for event in facts.applied(*_LAYERS):
        given = [event.term[name] for name in ("query", "src", "tgt", "memory", "key", "value")]
        queries = [one for one in given[:3] if one is not ABSENT][:1]
        if event.term["module"] is ABSENT or _may_be_batch_first(event.term["module"]) or not queries:
            continue
        sources = [one for term in (*queries, *given[3:]) for one in _same_leading_axes(term)]
        wrong = any(id(one) in batch_first or _is_batch_first_output(one) or _is_folded_batch(one) for one in sources)
        if wrong or _is_pooled_over_positions(event.term, facts) or _is_masked_as_batch_first(event.term, sources):
            name = str(event.term.value).removeprefix("torch.")
            yield Report(
                event.node,
                f"this {name} takes (length, batch, dim) and gets (batch, length, dim): make it with batch_first=True",
            )


def _is_batch_first_output(term: Term) -> bool:
    """Whether a term is the output of a module of torch that is made with batch_first=True."""
    module = term["module"] if term.applies(*_LAYERS) else ABSENT
    inner = module.get("encoder_layer") or module.get("decoder_layer") or module
    return inner.op == "call" and is_true(inner["batch_first"])


def _is_folded_batch(term: Term) -> bool:
    """Whether the first of three axes is the batch times something else, by its name, as in windows of a picture."""
    if term.op == "rearrange":
        return bool(re.search(r"-> *\((b|batch) [^)]+\) +(\w+|\([^)]+\)) +\w+ *$", str(term["pattern"].value)))
    sizes = _spelled_sizes(term) if term.op == "reshape" else []
    factors = sizes[0].split("*") if len(sizes) == 3 else []
    return len(factors) > 1 and any(_BATCH.match(one.strip(" ()")) for one in factors)


def _is_masked_as_batch_first(output: Term, sources: list[Term]) -> bool:
    """Whether the padding mask, which is (batch, length) always, is made of the embedded tokens as they are."""
    embeddings = (one for one in sources if one.applies("torch.nn.Embedding"))
    embedded = {id(one.input) for one in embeddings if one.input is not one}
    given = (output[name] for name in ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask"))
    compared = (one for mask in given if (one := through(mask, "invert", "bool", "cast")).op in ("equal", "not_equal"))
    mask = next((one for one in compared if not is_none(one["other"])), None)
    return mask is not None and id(mask.input) in embedded


def _may_be_batch_first(module: Term) -> bool:
    """Whether a module may take the batch first: it says so, or how it was made is not known."""
    if module.value in ("torch.nn.TransformerEncoder", "torch.nn.TransformerDecoder"):
        inner = module.get("encoder_layer") or module["decoder_layer"]
        return inner.op != "call" or _may_be_batch_first(inner)
    unknown = "**" in module.arguments or any(one.op == "starred" for one in module.items)
    flag = module["batch_first"]
    return unknown or (flag is not ABSENT and not (flag.op == "constant" and flag.value is False))


def _same_leading_axes(term: Term) -> Iterator[Term]:
    """Terms from which this one is computed without moving its first two axes."""
    for one in lineage(term, "apply", "dropout", "cast", "carried", "add", "mul", "div", "sub", "element", "choice"):
        yield one
        if one.op == "apply" and str(one.value or "").startswith("torch.nn.Conv"):
            return


def _is_pooled_over_positions(output: Term, facts: ModuleFacts) -> bool:
    """Whether the result is averaged over axis 1, or its entry 0 of axis 1 is taken, as of a class token."""
    for consumer in facts.uses(output, "element", "mean", "item"):
        if consumer.op == "element" and consumer.value == 0 and _is_pooled_over_positions(consumer, facts):
            return True
        if consumer.op == "mean" and consumer.input is output and number(consumer["dim"]) == 1:
            return True
        if consumer.op == "item" and consumer.input is output and len(consumer.items) in (2, 3):
            first, second = consumer.items[:2]
            if first.op == "slice" and number(second) in (0, -1) and output.value != "torch.nn.MultiheadAttention":
                return True
    return False


@rule("ATT406", Severity.ERROR)
def heads_first_for_flash_attn(facts: ModuleFacts) -> Iterator[Report]:
    """A function of flash-attn, which reads (batch, length, heads, dim), gets the heads before the positions."""
    for event in facts.operations("call", "sdpa"):
        called = str(event.term.value) if event.term.op == "sdpa" else event.name
        query = event.term.get("query") or next(iter(event.term.items), event.term["q"])
        reads = facts.framework if event.term.op == "sdpa" else _FLASH_ATTN.match(called)
        if reads and _has_heads_first(query):
            yield Report(event.node, f"{called} reads (batch, length, heads, dim), and gets the heads first")


_FLASH_ATTN = re.compile(r"flash_attn(_with_kvcache)?(_func)?$")


def _has_heads_first(operand: Term) -> bool:
    """Whether the axes (batch, length, heads, dim), by the names of their sizes, had the middle two exchanged."""
    *passed, made = lineage(operand, "transpose", "permute", "cast", "dropout", "carried", "element")
    sizes = _names_of_sizes(made) if made.op == "reshape" and len(made.items) == 4 else []
    known = all(one.op != "permute" or exchanges_middle(one) for one in passed)
    moves = sum(one.op in ("transpose", "permute") for one in passed)
    return known and bool(sizes) and _counts_heads(sizes[2]) and moves % 2 == 1


@rule("ATT407", Severity.WARNING)
def attention_over_one_key(facts: ModuleFacts) -> Iterator[Report]:
    """Attention runs over one key: every weight is 1, and the queries have no effect."""
    for site in facts.sites:
        if _is_one_long(site.key):
            yield Report(site.node, "attention over one key: every weight is 1, whatever the query is")


_PASSED_ON = ("cast", "dropout", "carried", "transpose", "contiguous")


def _is_one_long(key: Term) -> bool:
    """Whether keys were averaged over their positions, or cut to one of them, `:1` or `-1:`."""
    *passed, made = lineage(key, "apply", *_PASSED_ON)
    if any(one.op == "apply" and one.value != "torch.nn.Linear" for one in passed):
        return False
    if made.op in ("mean", "max", "amax", "sum"):
        return is_true(made["keepdim"]) and number(made["dim"]) in (1, -2)
    cut = made.items[1] if made.op == "item" and len(made.items) >= 2 and made.items[0].op == "slice" else ABSENT
    return cut.op == "slice" and ast.unparse(cut.node) in (":1", "0:1", "-1:")


@rule("ATT408", Severity.ERROR)
def keys_as_values(facts: ModuleFacts) -> Iterator[Report]:
    """The attention of Keras, which takes query, value and key, gets them as query, key and value."""
    for event in facts.applied(*KERAS_LAYERS):
        written = event.node.args if isinstance(event.node, ast.Call) else []
        names = " ".join(ast.unparse(one).rpartition(".")[2] for one in written[1:3])
        if re.match(r"k(eys?)?(_\w*)? v(al(ue)?s?)?(_|$)", names, re.I):
            message = "Keras takes query, value, key in this order: write value=..., key=..."
            unless = "this is a test, whose numbers are drawn at random" if facts.is_test else ""
            yield Report(event.node, message, unless=unless)
