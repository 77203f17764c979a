"""`regard doctor`: finds mistakes in the attention of Python sources."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard.cli.options import PageFile, check_page_file, save_page
from regard.cli.stdio import emit
from regard.errors import ConfigurationError

if TYPE_CHECKING:
    from regard.doctor import CodeFinding, RuleSelection
    from regard.doctor.doctor_settings import DoctorSettings


def doctor(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATHS...", show_default=False, help="Python files and folders of such."),
    ] = None,
    output_format: Annotated[
        Literal["text", "json", "sarif", "github"], typer.Option("--format", help="How findings are written.")
    ] = "text",
    min_severity: Annotated[
        Literal["error", "warning", "hint"] | None,
        typer.Option("--min-severity", show_default=False, help="The least that is reported. [default: hint]"),
    ] = None,
    select: Annotated[
        str, typer.Option(metavar="CODES", help="Report these codes alone; beginnings of codes count, as ATT2.")
    ] = "",
    ignore: Annotated[str, typer.Option(metavar="CODES", help="Do not report these codes.")] = "",
    explain: Annotated[
        str, typer.Option("--explain", metavar="CODE", help="Explain one rule, with examples, and exit.")
    ] = "",
    fix: Annotated[bool, typer.Option("--fix", help="Rewrite what can be proven to compute the same.")] = False,
    to: Annotated[
        Literal["sdpa", "regard"],
        typer.Option(help="With --fix: write torch's scaled_dot_product_attention, or regard.attention."),
    ] = "sdpa",
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="With --fix: also where git has changes that are not committed.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=0, show_default=False, help="Processes that read files. [default: one for each core]")
    ] = 0,
    html: PageFile = None,
) -> None:
    """Find mistakes in the attention of Python sources; nothing of them is run.

    Errors compute something else than attention, warnings are slow or fragile, hints could be written better. The exit
    code is 0 if nothing is found, 1 if something is, 2 for wrong arguments.

    A comment `# regard: ignore[ATT101]` on a line suppresses that finding there; `# regard: ignore-file[ATT101]` in the
    whole file. Defaults stand in [tool.regard.doctor] of pyproject.toml: select, ignore, exclude,
    min-severity, per-file-ignores, documentation (the address that SARIF and pages link to).
    """
    if explain:
        from regard.doctor.code_explanation import explanation

        emit([str(explanation(explain))])
        return
    if not paths:
        raise ConfigurationError("no files or folders were named; `regard doctor src` reads those in src")
    from regard.doctor import diagnose_files
    from regard.doctor.doctor_settings import settings_near
    from regard.doctor.report_formats import FORMATS
    from regard.doctor.source_discovery import python_files

    settings = settings_near(paths[0])
    selection = _selection(settings, select, ignore, min_severity)
    files = python_files(paths, settings.exclude)
    if html is not None:
        check_page_file(html, files)
    if fix:
        _fix(paths, files, to, selection, allow_dirty)
    findings = diagnose_files(files, selection, jobs or None)
    if html is not None:
        from regard.doctor.diagnosis_page import diagnosis_page

        page = diagnosis_page(
            findings, scope=_counted(files), to=to, selection=selection, documentation=settings.documentation
        )
        save_page(page, html)
    if findings or output_format in ("json", "sarif"):
        emit([FORMATS[output_format](findings, settings.documentation)])
    typer.echo(_summary(findings, files), err=True)
    if findings:
        raise typer.Exit(1)


def _selection(settings: DoctorSettings, select: str, ignore: str, min_severity: str | None) -> RuleSelection:
    from regard.doctor import RuleSelection
    from regard.doctor.doctor_settings import check_codes, severity_named

    chosen = _codes(select)
    ignored = _codes(ignore)
    check_codes(chosen, where="--select")
    check_codes(ignored, where="--ignore")
    least = severity_named(min_severity, where="--min-severity") if min_severity else settings.min_severity
    return RuleSelection(chosen or settings.select, (*ignored, *settings.ignore), least, settings.per_file_ignores)


def _fix(paths: list[Path], files: list[Path], to: str, selection: RuleSelection, allow_dirty: bool) -> None:
    from regard.doctor.fixing import check_clean, fix_files

    if not allow_dirty:
        check_clean(paths)
    for changed in fix_files(files, to=to, selection=selection):
        typer.echo(f"rewrote {changed.path}: {changed.fixes} {'fix' if changed.fixes == 1 else 'fixes'}", err=True)


def _codes(written: str) -> tuple[str, ...]:
    return tuple(code.strip().upper() for code in written.split(",") if code.strip())


def _counted(files: list[Path]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files):,} files"


def _summary(findings: list[CodeFinding], files: list[Path]) -> str:
    if not findings:
        return f"nothing found in {_counted(files)}" if files else "nothing was read: there are no Python files"
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.severity.value] = counts.get(finding.severity.value, 0) + 1
    shown = [
        f"{counts[name]} {name}{'s' if counts[name] > 1 else ''}"
        for name in ("error", "warning", "hint")
        if name in counts
    ]
    return f"{', '.join(shown)} in {_counted(files)}; `regard doctor --explain {findings[0].code}` explains a code"
