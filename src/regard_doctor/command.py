"""The command `regard-doctor`, which is `regard doctor` as well: finds mistakes in the attention of Python sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .baseline import Baseline
from .code_explanation import Language, explanation
from .diagnosis import UNREADABLE, RuleSelection, survey
from .doctor_error import DoctorError
from .doctor_settings import DoctorSettings, check_codes, settings_near, severity_named
from .finding import CodeFinding, Severity
from .report_formats import FORMATS
from .source_discovery import python_files


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
        typer.Option(
            "--min-severity",
            show_default=False,
            help="The least that is reported. [default: error; hint with --select or --fix]",
        ),
    ] = None,
    select: Annotated[
        str, typer.Option(metavar="CODES", help="Report these codes alone; beginnings of codes count, as ATT2.")
    ] = "",
    ignore: Annotated[str, typer.Option(metavar="CODES", help="Do not report these codes.")] = "",
    explain: Annotated[
        str, typer.Option("--explain", metavar="CODE", help="Explain one rule, with examples, and exit.")
    ] = "",
    language: Annotated[Language, typer.Option("--lang", help="With --explain: its language.")] = "en",
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
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Leave out what this file knows, as --write-baseline made it.")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a file that knows all that is found now, and exit.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write one page, with the code beside each finding, that works without a server."
        ),
    ] = None,
) -> None:
    """Find mistakes in the attention of Python sources; nothing of them is run.

    Errors compute something else than attention; warnings are slow or fragile, hints could be written better, and both
    are reported where --min-severity says so. The exit code is 0 if nothing is reported, 1 if something is, 2 for
    arguments, files or comments that cannot be read.

    A comment `# regard: ignore[ATT101]` on a line suppresses that finding there; `# regard: ignore-file[ATT101]` in the
    whole file. Defaults stand in [tool.regard.doctor] of pyproject.toml: select, ignore, exclude,
    min-severity, per-file-ignores, documentation (the address that SARIF and pages link to).
    """
    if explain:
        _emit([str(explanation(explain, language))])
        return
    if not paths:
        raise DoctorError("no files or folders were named; `regard doctor src` reads those in src")
    settings = settings_near(paths[0])
    selection = _selection(settings, select, ignore, _severity(min_severity, settings, every=bool(select or fix)))
    files = python_files(paths, settings.exclude)
    if html is not None:
        _check_page(html, files)
    if fix:
        _fix(paths, files, to, selection, allow_dirty)
    known = Baseline.read(baseline) if baseline is not None else Baseline.of([])
    findings, frameworks = survey(files, selection, jobs or None)
    if write_baseline is not None:
        Baseline.of(findings).write(write_baseline)
        typer.echo(f"{len(findings):,} findings of {_counted(files)} are known in {write_baseline}", err=True)
        return
    findings = known.new(findings)
    if html is not None:
        about = {"scope": _counted(files), "to": to, "selection": selection, "documentation": settings.documentation}
        _save_page(html, findings, about)
    if findings or output_format in ("json", "sarif"):
        _emit([FORMATS[output_format](findings, settings.documentation)])
    chosen = min_severity or settings.min_severity or selection.least is not Severity.ERROR or not files
    typer.echo(_summary(findings, files) + _unread(frameworks) + ("" if chosen else MORE), err=True)
    if any(_is_unread(finding) for finding in findings):
        raise typer.Exit(2)
    if any(finding.code != UNREADABLE for finding in findings):
        raise typer.Exit(1)


def _severity(named: str | None, settings: DoctorSettings, *, every: bool) -> Severity:
    """The least severity that is reported: as the option says, or the settings; else errors, or `every` finding."""
    if named:
        return severity_named(named, "--min-severity")
    return settings.min_severity or (Severity.HINT if every or settings.select else Severity.ERROR)


def _selection(settings: DoctorSettings, select: str, ignore: str, least: Severity) -> RuleSelection:
    chosen, ignored = check_codes(_codes(select), "--select"), check_codes(_codes(ignore), "--ignore")
    return RuleSelection(chosen or settings.select, (*ignored, *settings.ignore), least, settings.per_file_ignores)


def _fix(paths: list[Path], files: list[Path], to: str, selection: RuleSelection, allow_dirty: bool) -> None:
    from .fixing import check_clean, fix_files

    if not allow_dirty:
        check_clean(paths)
    for changed in fix_files(files, to=to, selection=selection):
        typer.echo(f"rewrote {changed.path}: {changed.fixes} {'fix' if changed.fixes == 1 else 'fixes'}", err=True)


@contextmanager
def _with_library() -> Iterator[None]:
    """The block draws a page, which the library does; its errors become those of the doctor."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "regard":
            raise
        raise DoctorError("--html needs the package 'regard', which draws the page; pip install regard") from None
    except ValueError as error:
        raise DoctorError(str(error)) from error


def _check_page(page: Path, read: list[Path]) -> None:
    with _with_library():
        from regard_command.options import check_page_file

        check_page_file(page, read)


def _save_page(path: Path, findings: list[CodeFinding], about: dict[str, Any]) -> None:
    with _with_library():
        from regard.doctor import diagnosis_page
        from regard_command.options import save_page

        save_page(diagnosis_page(findings, **about), path)


def _emit(lines: list[str]) -> None:
    """Write results to standard output, in UTF-8 whatever the locale."""
    sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode())
    sys.stdout.buffer.flush()


def _codes(written: str) -> tuple[str, ...]:
    return tuple(code.strip().upper() for code in written.split(",") if code.strip())


def _counted(files: list[Path]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files):,} files"


def _is_unread(finding: CodeFinding) -> bool:
    """Whether a finding says that a file, a cell or a comment cannot be read, and not that it is of another kind."""
    return finding.code == UNREADABLE and finding.severity is Severity.ERROR


def _unread(frameworks: dict[str, int]) -> str:
    """How many files have attention of a framework that no rule reads."""
    return "".join(
        f"; {count} {'file uses' if count == 1 else 'files use'} {name}: not analyzed"
        for name, count in frameworks.items()
    )


MORE = "; --min-severity warning, or hint, shows more"


def _summary(findings: list[CodeFinding], files: list[Path]) -> str:
    if not files:
        return "nothing was read: there are no Python files"
    if not findings:
        return f"nothing found in {_counted(files)}"
    counts = [(sum(one.severity is severity for one in findings), severity.value) for severity in Severity]
    shown = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count)
    return f"{shown} in {_counted(files)}; `regard doctor --explain {findings[0].code}` explains a code"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(doctor)


def main(arguments: list[str] | None = None, program: str = "regard-doctor") -> None:
    """Run the command with these arguments, by default those of the process; a mistake in them is one message."""
    try:
        app(arguments, prog_name=program)
    except DoctorError as error:
        typer.echo(f"regard: {error}", err=True)
        sys.exit(2)
