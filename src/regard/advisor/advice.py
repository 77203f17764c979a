"""Advice on the attention of a task: mechanism, mask, positions, cache and kernel, with predicted costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import ConfigurationError
from ..kernels.planning.rates import rates_in_use
from ..utils.units import format_bytes, format_count, format_seconds
from .cards import ASSUMED
from .mechanisms import Change, Mechanism, mechanisms
from .workload import Workload, with_model

WORTH = {
    Change.NOTHING: 1.0,
    Change.FEWER_BITS: 4.0,
    Change.FEWER_KEY_HEADS: 2.0,
    Change.ONE_KEY_HEAD: 8.0,
    Change.ANOTHER_SCORE: 4.0,
    Change.FEWER_PAIRS: 4.0,
    Change.APPROXIMATION: 16.0,
}
"""How many times faster than the recommended mechanism of less change a mechanism has to be to take its place."""


@dataclass(frozen=True)
class Advice:
    """The result of `advise`; print it for a table of the mechanisms, the recommendation and its reasons.

    workload: the task. mechanisms: all that were compared, the recommended one first, then by predicted time. parts:
    mask, positions, cache and kernel that go with it. rates: the origin of the predicted times. remark: what the
    memory allows, if nothing fits in it.
    """

    workload: Workload
    mechanisms: tuple[Mechanism, ...]
    parts: dict[str, str]
    rates: str
    remark: str = ""

    @property
    def recommended(self) -> Mechanism:
        """The recommended mechanism."""
        return self.mechanisms[0]

    def as_dict(self) -> dict[str, Any]:
        """All fields as numbers, texts and lists, for JSON."""
        found = asdict(self)
        found["mechanisms"] = [{**each, "change": Change(each["change"]).name.lower()} for each in found["mechanisms"]]
        return found

    def __str__(self) -> str:
        chosen = self.recommended
        lines = [describe(self.workload), self.rates, ""]
        lines += _table(self.mechanisms)
        lines += ["", *([self.remark] if self.remark else []), f"-> {chosen.name}: {chosen.reason}"]
        lines += _columns(
            [("quality", chosen.quality), ("code", chosen.code), *self.parts.items(), ("source", chosen.source)]
        )
        return "\n".join(lines)


def advise(model: Any = None, *, exact: bool = True, **workload: Any) -> Advice:
    """Compare the attention mechanisms that can do a task by predicted time and memory, and recommend one.

    Predictions are those of `explain`: the rates of this machine (`regard bench --calibrate` measures them), or default
    ones of another device; of a named card (`gpu`) they are by its data sheet (`cards`). They are of attention alone,
    of all layers together, without the linear maps around it.

    A mechanism that changes the model has to pay for it: to be recommended instead of one that changes less, it has to
    be faster by a factor of `WORTH`, 2 for fewer key heads to 16 for an approximation. All are in the table.

    Args:
        model: a model of Hugging Face, its configuration, a config.json or its folder; architecture, heads, layers and
            window are then its own, and so is the dtype unless it is an argument. Only what computes the same is
            compared, and caches of fewer bits.
        exact: whether to recommend only mechanisms that attend to all pairs that the task allows.
        workload: the fields of `Workload`: task, tokens, architecture, source_tokens, batch, layers, heads, key_heads,
            head_dim, window, local, dtype, device, gpu, memory.

    Raises:
        ConfigurationError, DeviceError: an argument that does not exist, or a number out of its range.

    >>> import regard
    >>> advice = regard.advise(task="decode", tokens=131072, memory="16GB", device="cuda")
    >>> advice.recommended.name
    'grouped-query, 4 key heads'
    """
    given = make_workload(workload)
    given = given if model is None else with_model(given, model, frozenset(workload))
    if given.device_type == "cuda" and given.gpu is None and not rates_in_use("cuda").measured:
        given = replace(given, gpu=ASSUMED)
    found = mechanisms(given)
    chosen = recommend([each for each in found if not exact or each.change < Change.FEWER_PAIRS])
    remark = "" if chosen.fits else nearest_feasible(given, chosen, found)
    rest = sorted((each for each in found if each is not chosen), key=lambda each: each.price.seconds)
    return Advice(given, (chosen, *rest), parts_beside(given, chosen), origin_of_rates(given), remark)


def origin_of_rates(workload: Workload) -> str:
    """Where the predicted times come from, as text."""
    if (card := workload.card) is None:
        return f"predicted by rates that are {rates_in_use(workload.device_type).origin}"
    return (
        f"predicted from the data sheet of the {card.name}: {card.bandwidth:g} TB/s, {card.half:g} TFLOP/s in "
        "bfloat16, and the shares of it that attention reached on an H200"
    )


def make_workload(settings: dict[str, Any]) -> Workload:
    """A workload from keyword arguments.

    Raises:
        ConfigurationError: an argument that a workload does not have.
    """
    try:
        given = Workload(**settings)
        return replace(given, memory=int(1e9 * card.memory)) if (card := given.card) and not given.memory else given
    except TypeError:
        known = [name for name in Workload.__dataclass_fields__ if name not in ("fixed", "positions")]
        unknown = sorted(settings.keys() - set(known))
        raise ConfigurationError(f"there is no argument {', '.join(unknown)}; known: {', '.join(known)}") from None


def recommend(found: Sequence[Mechanism]) -> Mechanism:
    """The mechanism of the least change, unless one of more change is faster by its factor in `WORTH`.

    Those that do not fit in memory count only where none does; the one of the least memory is then recommended. Of
    caches of fewer bits it is the one of the most bits that fits.
    """
    able = [each for each in found if each.fits]
    if not able:
        return min(found, key=lambda each: each.price.memory)
    able.sort(key=_by_change)
    chosen = able[0]
    for each in able:
        if each.change > chosen.change and each.price.seconds * WORTH[each.change] < chosen.price.seconds:
            chosen = each
    return chosen


def _by_change(mechanism: Mechanism) -> tuple[Change, float]:
    """The order in which mechanisms are tried: the least change first, then the fastest, of fewer bits the most."""
    price = mechanism.price
    return mechanism.change, -price.cache if mechanism.change is Change.FEWER_BITS else price.seconds


def nearest_feasible(workload: Workload, least: Mechanism, found: Sequence[Mechanism]) -> str:
    """Text on the mechanism of the least memory: how much it needs, and the most tokens that fit in what there is.

    found: all mechanisms, of which one that is not exact may fit.
    """
    memory = int(workload.memory or 0)
    tokens = most_tokens(workload, least, memory)
    fewer = f", or {tokens:,} tokens in this much" if tokens else "; not even one token fits in this much"
    others = [each.name for each in found if each.fits]
    inexact = f". Of those that leave out pairs or approximate, {others[0]} fits: --any, exact=False" if others else ""
    return (
        f"nothing {'exact ' if others else ''}fits in {_decimal_bytes(workload)}: the least is {least.name}, which "
        f"needs {format_bytes(least.price.memory)}. Feasible are that much memory{fewer}{inexact}"
    )


def most_tokens(workload: Workload, mechanism: Mechanism, memory: int) -> int:
    """The most tokens for which a mechanism fits in memory, by bisection; 0 if one token does not fit."""
    low, high = 0, workload.tokens
    while high - low > max(low // 1000, 1):
        middle = (low + high) // 2
        same = [each for each in mechanisms(replace(workload, tokens=middle)) if each.name == mechanism.name]
        if same and same[0].price.memory <= memory:
            low = middle
        else:
            high = middle
    return low


def parts_beside(workload: Workload, chosen: Mechanism) -> dict[str, str]:
    """Mask, positions, cache and kernel for a mechanism, each with its reason."""
    linear = chosen.change is Change.APPROXIMATION
    parts = {"mask": _mask_advice(workload), "positions": _position_advice(workload)}
    if workload.task == "decode" or workload.architecture == "translation":
        parts["cache"] = (
            "LinearCache: a state of constant size"
            if linear
            else "KVCache(Rolling(mask)): keys that no query attends to are dropped"
            if chosen.change is Change.FEWER_PAIRS or workload.window
            else f"KVCache().packed(...): keys and values in fewer bits, as {chosen.code}"
            if chosen.change is Change.FEWER_BITS
            else "KVCache(): keys and values of each token are computed once"
        )
    parts["kernel"] = f"{chosen.price.kernel}, by predicted time; regard.explain says why"
    return parts


def _mask_advice(workload: Workload) -> str:
    if workload.architecture == "decoder":
        return "causal(), and documents(ids) where several share a sequence: no token reads what it has to predict"
    return "padding(lengths) where a batch has sentences of several lengths"


def _position_advice(workload: Workload) -> str:
    if workload.positions:
        return f"those of the model: {workload.positions}"
    if workload.architecture == "translation":
        return "sinusoidal or learned in the encoder and decoder; cross-attention itself has none"
    if workload.tokens > 8192:
        return "rotary with YaRN scaling beyond the trained length; biases.alibi where it has to extrapolate unscaled"
    return "rotary, which depends on distances alone (Su et al. 2021, arXiv 2104.09864)"


def describe(workload: Workload) -> str:
    """The workload as text, a line."""
    source = f" over {workload.source_tokens:,} of the source" if workload.source_tokens else ""
    limit = "" if workload.memory is None else f", memory {_decimal_bytes(workload)}"
    key_heads = workload.key_heads or workload.heads
    return (
        f"{workload.task}, {workload.architecture}: {workload.tokens:,} tokens{source}, batch {workload.batch}, "
        f"{workload.layers} layers of {workload.heads} heads of {workload.head_dim} ({key_heads} key heads), "
        f"{workload.dtype} on {card.name if (card := workload.card) else workload.device}{limit}"
    )


def _decimal_bytes(workload: Workload) -> str:
    """The memory of a workload in GB and its kin, as users write it."""
    return f"{format_count(float(workload.memory or 0))}B"


def _table(found: Sequence[Mechanism]) -> list[str]:
    rows = [("", "mechanism", "kernel", "FLOPs", "read, written", "cache", "memory", "time", "changes")]
    for number, each in enumerate(found):
        price = each.price
        numbers = (
            format_count(price.flops),
            format_bytes(price.bytes),
            format_bytes(price.cache),
            format_bytes(price.memory),
        )
        change = each.change.name.lower().replace("_", " ") + ("" if each.fits else ", too large")
        rows.append(
            ("->" if number == 0 else "", each.name, price.kernel, *numbers, format_seconds(price.seconds), change)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _columns(lines: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in lines) + 2
    return [f"   {label:<{width}}{text}" for label, text in lines]
