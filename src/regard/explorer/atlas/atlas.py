"""The `Atlas` class: the attention maps of a model, in memory or memory-mapped from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ...errors import AtlasError
from .atlas_file import check_title, open_atlas, save_atlas, validated_roles
from .attention_map import AttentionMap
from .records import records_from_weights
from .tokenized_text import TokenTable
from .translation_info import RankedTranslation, check_fit, parse_gold_links, to_json, validated_hypotheses, word_count


class Atlas:
    """The attention of a model: one map for each attention module, call, and sequence of the batch.

    It is made by `regard.explorer.record`, by `Atlas.open` from a file, or by `Atlas.from_weights` from other tools'
    arrays. Of each call it holds queries and keys, one log-sum-exp a row, and which pairs exist: any tile of the exact
    weights is computed from these when it is asked for. Beside them are a pyramid of cells, the largest and the mean
    weight of each, entropies, row maxima, column sums, and metrics. It grows with the lengths, not with their product:
    the pyramid takes at most one and a half times the bytes of queries and keys, or 1024 × 1024 cells a head.

    The file is in the safetensors format, one JSON text and raw arrays that are mapped into memory. Nothing in it is
    code, and all of it is checked when it is opened.

    title: its name. maps: in the order of modules, calls and sequences.
    """

    notebook_view: ClassVar[Callable[..., Any]]
    """What `show` calls; `regard.explorer.notebook` sets it, which imports this module and not the other way."""

    def __init__(self, records: Sequence[Mapping[str, Any]], arrays: Mapping[str, Tensor], title: str = "") -> None:
        self.title = title
        self._records, self._arrays = tuple(records), arrays
        self.maps: tuple[AttentionMap, ...] = tuple(
            AttentionMap(record, arrays, sequence) for record in records for sequence in range(sequences(record))
        )

    @classmethod
    def open(cls, path: str | Path) -> Atlas:
        """Open a file; arrays are read lazily, so the file must not change while the atlas is in use.

        Raises:
            AtlasError: the file is missing, truncated, of a newer version, no atlas, or inconsistent in any part.
            MissingExtra: safetensors is not installed.
        """
        title, records, arrays = open_atlas(Path(path))
        return cls(records, arrays, title)

    @classmethod
    def from_weights(
        cls, maps: Mapping[str, Any] | Sequence[Any], *, tokens: Any = None, title: str = "", tolerance: float = 0.02
    ) -> Atlas:
        """Make an atlas of attention weights that another tool computed, stored in half precision.

        Args:
            maps: by name, or in a list (which is then "layers.0", "layers.1", ...): tensors or arrays (heads, M, N) or
                (batch, heads, M, N), such as transformers' `attentions`.
            tokens: as of `Recording.atlas`; maps whose M and N differ are cross-attention.
            title: what the atlas is called.
            tolerance: by how much a row may sum to more than 1, as half precision makes it.

        Raises:
            AtlasError: something else than such arrays; weights that are negative or not finite, or rows over 1; words
                that do not fit, or a title that is none.

        >>> import torch
        >>> from regard.explorer import Atlas
        >>> atlas = Atlas.from_weights({"head": torch.tensor([[[1.0, 0.0], [0.25, 0.75]]])}, tokens=["a", "b"])
        >>> atlas.maps[0].weights(0, slice(1, 2), slice(0, 2)).tolist(), atlas.maps[0].key_tokens
        ([[0.25, 0.75]], ('a', 'b'))
        """
        check_title(title)
        words = TokenTable()
        records, arrays = records_from_weights(maps, tokens, tolerance, words)
        return cls(records, {**arrays, **words.arrays()}, title)

    def show(self, *, state: Any = None, rerun: Callable[[str], Atlas] | None = None, height: int = 640) -> Any:
        """Display the atlas in a notebook: a live widget with anywidget, else a static page in a frame.

        Arguments, result and errors are those of `regard.explorer.show`.
        """
        return self.notebook_view(self, state=state, rerun=rerun, height=height)

    def save(self, path: str | Path) -> None:
        """Write the atlas to one file, replaced atomically.

        Raises:
            AtlasError: it cannot be written, or its title is none.
            MissingExtra: safetensors is not installed.
        """
        check_title(self.title)
        save_atlas(Path(path), self.title, self._records, self._arrays)

    def with_roles(self, roles: Sequence[Sequence[Sequence[Mapping[str, Any]]]]) -> Atlas:
        """A copy with roles: for each of `maps`, for each head, a list of {"name", "score", "n", "rule"}.

        name and rule are words, score a number, n how many cases it was counted on.

        Raises:
            AtlasError: roles that are not that.
        """
        return self._with_field("roles", validated_roles(roles, [(of.name, of.heads) for of in self.maps]))

    def with_gold(self, gold: Any, *, sequence: int = 0, hypothesis: int | None = None) -> Atlas:
        """A copy with gold word alignments between a sentence and its translation.

        They belong to the maps of cross-attention of one sequence of the batch, and of one hypothesis where the maps
        are of several. Words are those that `TokenizedText` told; where they told none, each token is a word.

        Args:
            gold: "0-0 1-2 2?3", source word first, with ? or p for a link that is only possible; pairs, which are
                sure; or what has `sure` and `possible`, such as `regard.heads.word_alignment.SentenceLinks`.
            sequence: of the batch.
            hypothesis: the rank of the hypothesis; without it maps of all hypotheses get the links.

        Raises:
            AtlasError: what is given is no links; a link of a word that is not there; no such map of cross-attention.

        >>> import torch
        >>> atlas = Atlas.from_weights([torch.full((1, 2, 3), 1 / 3)], tokens=(["le", "chat"], ["the", "cat", "."]))
        >>> sorted(atlas.with_gold("0-0 1?1").maps[0].gold.sure)
        [(0, 0)]
        """
        links = parse_gold_links(gold)
        held: list[Any] = [of.record.get("gold") and of.record["gold"][of.sequence] for of in self.maps]
        fitting = [
            at
            for at, of in enumerate(self.maps)
            if of.kind == "cross"
            and of.sequence == sequence
            and (hypothesis is None or (of.hypothesis is not None and of.hypothesis.rank == hypothesis))
        ]
        if not fitting:
            which = "" if hypothesis is None else f" and hypothesis {hypothesis}"
            raise AtlasError(f"there is no map of cross-attention of sequence {sequence}{which} to have gold links")
        for at in fitting:
            of = self.maps[at]
            check_fit(links, word_count(of.key_words, of.keys), word_count(of.query_words, of.queries))
            held[at] = to_json(links)
        return self._with_field("gold", held)

    def with_hypotheses(self, hypotheses: Sequence[RankedTranslation | None]) -> Atlas:
        """A copy that assigns each of `maps` to one of the n best translations; None: none.

        Raises:
            AtlasError: not one entry for each map.
        """
        return self._with_field("hypotheses", validated_hypotheses(hypotheses, len(self.maps)))

    def _with_field(self, name: str, entries: Sequence[Any]) -> Atlas:
        """A copy whose records have this field, one entry for each map; omitted if all entries are None."""
        records, at = [], 0
        for record in self._records:
            own = list(entries[at : (at := at + sequences(record))])
            rest = {key: value for key, value in record.items() if key != name}
            records.append({**rest, name: own} if any(entry is not None for entry in own) else rest)
        return Atlas(records, self._arrays, self.title)

    def __repr__(self) -> str:
        title = f" {self.title!r}" if self.title else ""
        modules = len({of.name for of in self.maps})
        return f"<atlas{title}: {len(self.maps)} maps of {modules} attention modules>"


def sequences(record: Mapping[str, Any]) -> int:
    """The number of sequences, the product of the batch axes, of a record."""
    leading = record["leading"][:-1] if record["head_axis"] else record["leading"]
    count = 1
    for size in leading:
        count *= size
    return count
