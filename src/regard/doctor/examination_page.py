"""The page of `regard examine --html`: findings of a running model, with evidence, maps and the code of the module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard_doctor.python_source import UnreadableSource, decoded, read_bytes

from .code_excerpt import CodeRange, escaped, excerpt, source_lines
from .examination_report import Evidence, Examination, ModelFinding
from .findings_page import PageFinding, definitions, findings_page, page_rule
from .map_figure import HATCH, atlas_of_maps, figure

if TYPE_CHECKING:
    from ..explorer.static_page import StaticPage

MODEL = "the model as a whole"
"""The section of findings that no module is named in."""
LINES_AFTER = 16
"""Lines of a module's `forward` that are displayed."""


def examination_page(examination: Examination) -> StaticPage:
    """A self-contained HTML page of what `examine` found; `.save(path)` writes it.

    Each finding has its evidence, the code of the module, its explanation, and, where `examine` was called with
    `maps=True`, the maps that show it, which open in the explorer inside the page: the influence of each token on each
    output, and weights of heads. The page works without a network, from a file.

    >>> import torch
    >>> from regard.doctor import examine
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> found = examine(layer, torch.randn(2, 12, 8), causal=True, checks=["future"], maps=True)
    >>> page = examination_page(found)
    >>> page.contents, "regard-explorer" in page.text
    ('1 error in TransformerEncoderLayer, 1 check', True)
    """
    from ..explorer import static_page

    maps = [map_ for found in examination.findings for map_ in found.maps]
    atlas, states = atlas_of_maps(maps, f"regard examine {examination.model}")
    state_of = dict(zip(map(id, maps), states, strict=True))
    entries = [finding_entry(found, state_of) for found in examination.findings]
    rules = [page_rule(code) for code in sorted(examination.codes)]
    checks = f"{len(examination.checked)} check{'' if len(examination.checked) == 1 else 's'}"
    return findings_page(
        f"regard examine {examination.model}",
        sorted(entries, key=lambda entry: (entry.severity.rank, entry.file == MODEL)),
        rules,
        scope=f"{examination.model}, {checks}",
        closing=[_checks(examination), *([] if atlas is None else [HATCH])],
        map_page="" if atlas is None else static_page(atlas).text,
    )


def finding_entry(found: ModelFinding, state_of: dict[int, str | None]) -> PageFinding:
    """A finding with its evidence, its maps and the code of its module; `state_of` has a permalink by id of a map."""
    evidence = found.evidence
    figures = "".join(figure(map_, state_of[id(map_)]) for map_ in found.maps)
    parts = (_evidence(found), f'<div class="maps">{figures}</div>' if figures else "", _code(evidence))
    place = "" if evidence.line is None else f"line {evidence.line}"
    return PageFinding(found.code, found.name, found.message, found.severity, shown_file(evidence.file), place, parts)


def shown_file(file: str | None) -> str:
    """A file by its path from the working directory, or from the folder of installed packages."""
    if file is None:
        return MODEL
    path = Path(file)
    if "site-packages" in path.parts:
        return str(Path(*path.parts[path.parts.index("site-packages") + 1 :]))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _evidence(found: ModelFinding) -> str:
    evidence, mended = found.evidence, found.mended_by_swap
    rows = {
        "token changed": evidence.changed,
        "output moved": evidence.moved,
        "by": None if evidence.by is None else f"{evidence.by:.3g}",
        "rounding explains up to": None if evidence.tolerance is None else f"{evidence.tolerance:.1g}",
        "module": None if evidence.module is None else evidence.module or "the model itself",
        "regard.huggingface.swap": None if mended is None else ("mends it" if mended else "does not mend it"),
    }
    return definitions(rows.items())


def _code(evidence: Evidence) -> str:
    """The lines around the one of the evidence; more behind it than before it, as it may be the start of a function."""
    if evidence.file is None or evidence.line is None:
        return ""
    try:
        lines = source_lines(decoded(read_bytes(Path(evidence.file))))
    except UnreadableSource:
        return ""
    code = excerpt(lines, CodeRange.of_line(evidence.line), after=LINES_AFTER)
    does = "computes it" if evidence.module is not None else "is concerned"
    return f"<h4>The code that {does}</h4>{code}" if code else ""


def _checks(examination: Examination) -> str:
    ran = escaped(", ".join(examination.checked)) or "none"
    skipped = definitions(examination.skipped.items())
    return f"<section><h2>Checks</h2><p>Ran: {ran}.</p>{skipped and '<h3>Not run</h3>'}{skipped}</section>"
