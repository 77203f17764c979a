"""Rules about axes: how heads are split and merged, in which order they are repeated, which axis is the batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..array_frameworks import KERAS_LAYERS
from ..attention_sites import AttentionSite, equation_axes
from ..finding import Severity
from ..module_facts import ModuleFacts
from ..term import Term, exchanges_middle, is_none, is_true, lineage, moved_axes, number, text, through, walk
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
    for site in _sites_with_heads(facts):
        for operand in (site.query, site.key, site.value):
            split = _split(operand)
            if split is not None and _is_head_first(split):
                yield Report(
                    split.node,
                    "this reshape of (batch, length, heads · dim) to (batch, heads, length, dim) mixes positions with "
                    "heads: view as (batch, length, heads, dim), then transpose(1, 2)",
                )
            folded = _folded_at_once(operand)
            if folded is not None:
                yield Report(
                    folded.node,
                    "this reshape of (batch, length, heads · dim) to (batch · heads, length, dim) mixes positions with "
                    "heads: view as (batch, length, heads, dim), then transpose(1, 2)",
                )


def _folded_at_once(operand: Term) -> Term | None:
    """The reshape of a projection to (batch · heads, length, dim) with no axes moved between, if there is one."""
    operand = through(operand, "cast", "dropout", "carried", "mul", "div", "transpose")
    sizes = _spelled_sizes(operand) if operand.op == "reshape" else []
    heads_first = len(sizes) == 3 and "*" in sizes[0] and any(_HEADS.search(one) for one in sizes[0].split("*"))
    source = operand.input
    projected = source.op == "apply" and source.value == "torch.nn.Linear"
    return (
        operand if heads_first and projected and any(_BATCH.match(one.strip()) for one in sizes[0].split("*")) else None
    )


def _sites_with_heads(facts: ModuleFacts) -> Iterator[AttentionSite]:
    return (site for site in facts.sites if site.kind in ("formula", "sdpa", "flex"))


def _split(operand: Term) -> Term | None:
    """The reshape into four axes whose input comes from a linear projection with no axes moved between."""
    *_, reshape = lineage(operand, *_MOVED_OR_CUT)
    if reshape.op != "reshape" or len(reshape.items) != 4:
        return None
    source = through(reshape.input, "cast", "dropout", "carried", "element")
    return reshape if source.op == "apply" and source.value == "torch.nn.Linear" else None


_MOVED_OR_CUT = (
    *("cast", "dropout", "carried", "mul", "div", "transpose", "permute", "choice", "element", "chunk", "split"),
)


def _spelled_sizes(reshape: Term) -> list[str]:
    """How the sizes of a reshape are written."""
    call = reshape.node
    if not isinstance(call, ast.Call):
        return []
    written = [*call.args, *(one.value for one in call.keywords if isinstance(one.value, ast.Tuple | ast.List))]
    if len(written) == 2 and isinstance(written[1], ast.Tuple | ast.List):
        written = written[1].elts
    if len(written) == 1 and isinstance(written[0], ast.Tuple | ast.List):
        written = written[0].elts
    return [ast.unparse(one) for one in written]


def _is_head_first(reshape: Term) -> bool:
    sizes = _spelled_sizes(reshape)
    if len(sizes) != 4:
        return False
    last = [size.rpartition(".")[2] for size in sizes]
    heads_second = bool(_HEADS.search(last[1])) and "dim" not in last[1]
    length_third = not _HEADS.search(last[2]) and "dim" not in last[2] and number(reshape.items[2]) != 1
    length_third = length_third and not re.search(r"^(d|hd|hs|dk|d_k|d_v|d_head)$", last[2])
    return heads_second and length_third


@rule("ATT402", Severity.ERROR)
def heads_merged_across_positions(facts: ModuleFacts) -> Iterator[Report]:
    """Heads are merged by a reshape without moving their axis back behind the positions."""
    for site in _sites_with_heads(facts):
        if not _is_transposed_from_positions(site.query) or not _keeps_axes(site):
            continue
        for reshape in _direct_reshapes(site.output, facts):
            sizes = _spelled_sizes(reshape)
            if len(sizes) == 3 and not any(_HEADS.fullmatch(size.rpartition(".")[2]) for size in sizes):
                yield Report(
                    reshape.node,
                    "this reshape of (batch, heads, length, dim) to (batch, length, heads · dim) mixes heads with "
                    "positions: transpose(1, 2) first",
                )
    for site in _sites_with_heads(facts):
        folded = _folded_rows(site.query)
        if folded is None or not _keeps_axes(site):
            continue
        for reshape in _direct_reshapes(site.output, facts):
            if len(reshape.items) == 3 and text(reshape.items[0]) != text(folded) and number(reshape.items[0]) != -1:
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
    if query.op == "element" and query.input.op in ("chunk", "split") and number(query.input.get("dim")) == -1:
        return _is_transposed_from_positions(query.input.input)
    if query.op == "element":  # of q, k and v from one projection, heads before positions
        moved = query.input.input if query.input.op == "unbind" else query.input
        return moved_axes(moved) == [2, 0, 3, 1, 4] and moved.input.op == "reshape" and len(moved.input.items) == 5
    return False


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
                elif (one.op == "repeat" and _tiles_heads(one)) or _is_concatenated(one):
                    yield Report(
                        one.node,
                        "this tiles the key heads as 0 1 0 1, and query heads are grouped as 0 0 1 1: "
                        "use repeat_interleave, or enable_gqa=True of scaled_dot_product_attention",
                    )


def _repeats_positions(repeat: Term) -> bool:
    """Whether keys of (batch, length, heads, dim), by the names of their sizes, are repeated along the positions."""
    axis = number(repeat.get("dim")) if repeat.op == "repeat_interleave" else None
    sizes = _spelled_sizes(repeat.input) if axis == 1 and repeat.input.op == "reshape" else []
    last = [size.rpartition(".")[2] for size in sizes]
    return len(last) == 4 and bool(_LENGTH.match(last[1])) and bool(_HEADS.search(last[2])) and "dim" not in last[2]


def _is_concatenated(joined: Term) -> bool:
    """Whether keys are joined with themselves along the heads: `cat([k] * groups, dim=1)`."""
    tensors = joined.get("tensors") if joined.op == "cat" else None
    if tensors is None or tensors.op != "mul" or number(joined.get("dim")) != 1:
        return False
    return any(one.op == "tuple" and len(one.items) == 1 for one in tensors.operands())


def _tiles_heads(repeat: Term) -> bool:
    sizes = _spelled_sizes(repeat)
    many = [index for index, size in enumerate(sizes) if size != "1"]
    if len(sizes) != 4 or len(many) != 1 or many[0] not in (1, 2):
        return False
    inner = repeat.input
    inserted = inner.op == "item" and many[0] < len(inner.items) and is_none(inner.items[many[0]])
    one_head = (
        inserted
        or inner.op == "unsqueeze"
        or (
            inner.op in ("transpose", "reshape")
            and any(number(size) == 1 for size in (*inner.items, *inner.input.items))
        )
    )
    return not one_head and bool(re.search(r"//|rep|group|kv", sizes[many[0]], re.I))


@rule("ATT404", Severity.ERROR)
def batch_as_sequence(facts: ModuleFacts) -> Iterator[Report]:
    """A module of torch that expects (length, batch, dim) gets (batch, length, dim): it attends across the batch."""
    batch_first = {
        id(event.term.input)
        for event in facts.operations("unpack")
        if len(event.term.value) in (2, 3) and _BATCH.match(event.term.value[0]) and _LENGTH.match(event.term.value[1])
    }
    for event in facts.applied(*_LAYERS):
        module = event.term.get("module")
        if module is None or _may_be_batch_first(module):
            continue
        query = event.term.get("query") or event.term.get("src") or event.term.get("tgt")
        if query is None:
            continue
        sources = list(_same_leading_axes(query))
        others = [event.term.get(name) for name in ("memory", "key", "value")]
        sources += [one for other in others if other is not None for one in _same_leading_axes(other)]
        wrong = any(id(one) in batch_first or _is_batch_first_output(one) for one in sources)
        if wrong or _is_pooled_over_positions(event.term, facts) or _is_masked_as_batch_first(event.term, sources):
            name = str(event.term.value).removeprefix("torch.")
            yield Report(
                event.node,
                f"this {name} takes (length, batch, dim) and gets (batch, length, dim): make it with batch_first=True",
            )


def _is_batch_first_output(term: Term) -> bool:
    """Whether a term is the output of a module of torch that is made with batch_first=True."""
    module = term.get("module") if term.op == "apply" and term.value in _LAYERS else None
    inner = module.get("encoder_layer") or module.get("decoder_layer") or module if module is not None else None
    return inner is not None and inner.op == "call" and is_true(inner.get("batch_first"))


def _is_masked_as_batch_first(output: Term, sources: list[Term]) -> bool:
    """Whether the padding mask, which is (batch, length) always, is made of the embedded tokens as they are."""
    embedded = {
        id(one.input)
        for one in sources
        if one.op == "apply" and one.value == "torch.nn.Embedding" and one.input is not one
    }
    for name in ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask"):
        mask = output.get(name)
        while mask is not None and mask.op in ("invert", "bool", "cast"):
            mask = mask.input
        if mask is not None and mask.op in ("equal", "not_equal") and not is_none(mask.get("other")):
            return id(mask.input) in embedded
    return False


def _may_be_batch_first(module: Term) -> bool:
    """Whether a module may take the batch first: it says so, or how it was made is not known."""
    inner = module.get("encoder_layer") or module.get("decoder_layer")
    if module.value in ("torch.nn.TransformerEncoder", "torch.nn.TransformerDecoder"):
        return inner is None or inner.op != "call" or _may_be_batch_first(inner)
    flag = module.get("batch_first")
    if "**" in module.arguments or any(one.op == "starred" for one in module.items):
        return True
    return (flag is not None and not (flag.op == "constant" and flag.value is False)) or is_true(flag)


def _same_leading_axes(term: Term) -> Iterator[Term]:
    """Terms from which this one is computed without moving its first two axes."""
    for one in lineage(term, "apply", "dropout", "cast", "carried", "add", "mul", "div", "sub", "element", "choice"):
        yield one
        if one.op == "apply" and str(one.value or "").startswith("torch.nn.Conv"):
            return


def _is_pooled_over_positions(output: Term, facts: ModuleFacts) -> bool:
    """Whether the result is averaged over axis 1, or its entry 0 of axis 1 is taken, as of a class token."""
    for consumer in facts.uses(output):
        if consumer.op == "element" and consumer.value == 0 and _is_pooled_over_positions(consumer, facts):
            return True
        if consumer.op == "mean" and consumer.input is output and number(consumer.get("dim")) == 1:
            return True
        if consumer.op == "item" and consumer.input is output and len(consumer.items) in (2, 3):
            first, second = consumer.items[:2]
            if first.op == "slice" and number(second) in (0, -1) and output.value != "torch.nn.MultiheadAttention":
                return True
    return False


@rule("ATT406", Severity.ERROR)
def heads_first_for_flash_attn(facts: ModuleFacts) -> Iterator[Report]:
    """A function of flash-attn, which reads (batch, length, heads, dim), gets the heads before the positions."""
    for event in facts.operations("call"):
        name = str(event.term.value).rpartition(".")[2]
        if not re.match(r"flash_attn(_with_kvcache)?(_func)?$", name):
            continue
        query = event.term.items[0] if event.term.items else event.term.get("q")
        if query is not None and _has_heads_first(query):
            yield Report(event.node, f"{name} reads (batch, length, heads, dim), and gets the heads first")
    for event in facts.operations("sdpa") if facts.framework else ():
        query = event.term.get("query")
        if query is not None and _has_heads_first(query):
            name = str(event.term.value)
            yield Report(event.node, f"{name} reads (batch, length, heads, dim), and gets the heads first")


def _has_heads_first(operand: Term) -> bool:
    """Whether the axes (batch, length, heads, dim), by the names of their sizes, had the middle two exchanged."""
    moves = 0
    for _ in range(20):
        if operand.op == "transpose" or exchanges_middle(operand):
            moves += 1
        elif operand.op == "reshape" and len(operand.items) == 4:
            sizes = [size.rpartition(".")[2] for size in _spelled_sizes(operand)]
            heads_third = len(sizes) == 4 and bool(_HEADS.search(sizes[2])) and "dim" not in sizes[2]
            return heads_third and moves % 2 == 1
        elif operand.op not in ("cast", "dropout", "carried", "element"):
            return False
        operand = operand.input
    return False


@rule("ATT407", Severity.WARNING)
def attention_over_one_key(facts: ModuleFacts) -> Iterator[Report]:
    """Attention runs over one key: every weight is 1, and the queries have no effect."""
    for site in facts.sites:
        if _is_one_long(site.key):
            yield Report(site.node, "attention over one key: every weight is 1, whatever the query is")


_PASSED_ON = ("cast", "dropout", "carried", "transpose", "contiguous")


def _is_one_long(key: Term) -> bool:
    """Whether keys were averaged over their positions, or cut to one of them."""
    *passed, made = lineage(key, "apply", *_PASSED_ON)
    if any(one.op == "apply" and one.value != "torch.nn.Linear" for one in passed):
        return False
    if made.op in ("mean", "max", "amax", "sum"):
        return is_true(made.get("keepdim")) and number(made.get("dim")) in (1, -2)
    return (
        made.op == "item" and len(made.items) >= 2 and made.items[0].op == "slice" and _is_one_position(made.items[1])
    )


def _is_one_position(index: Term) -> bool:
    """Whether an index is `:1` or `-1:`."""
    written = ast.unparse(index.node) if isinstance(index.node, ast.expr) else ""
    return index.op == "slice" and written in (":1", "0:1", "-1:")


@rule("ATT408", Severity.ERROR)
def keys_as_values(facts: ModuleFacts) -> Iterator[Report]:
    """The attention of Keras, which takes query, value and key, gets them as query, key and value."""
    for event in facts.applied(*KERAS_LAYERS):
        written = event.node.args if isinstance(event.node, ast.Call) else []
        names = [ast.unparse(one).rpartition(".")[2] for one in written[1:3]]
        if (
            len(names) == 2
            and re.match(r"k(eys?)?(_|$)", names[0], re.I)
            and re.match(r"v(al(ue)?s?)?(_|$)", names[1], re.I)
        ):
            message = "Keras takes query, value, key in this order: write value=..., key=..."
            unless = "this is a test, whose numbers are drawn at random" if facts.is_test else ""
            yield Report(event.node, message, unless=unless)
