"""`regard steps`: one head's attention step by step, as tables, for a trained translator or a worked example."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard_command.command_error import CommandError
from regard_command.options import LanguageCodes, Which, check_page_file, languages_of, save_page, translator_folder
from regard_command.stdio import emit

if TYPE_CHECKING:
    from regard.steps import Walkthrough
    from regard.steps.live_steps import LiveSteps, StepRequest


def steps(
    sentence: Annotated[
        str | None, typer.Argument(metavar="SENTENCE", help="To translate.", show_default=False)
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="Which of the translators that regard comes with, by its score: dot (Luong) and additive (Bahdanau), "
            "Korean to English, or scaled_dot (a head of a Transformer) and multi_head (all its heads), English to "
            "French. [default: dot for Hangul, scaled_dot for other text]",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            parser=translator_folder,
            help="Another translator: a run of `regard train`, one of transformers, or the name of one that regard "
            "comes with, as english_french_longer.",
        ),
    ] = None,
    languages: LanguageCodes = None,
    which: Which = "best",
    word: Annotated[
        int, typer.Option(min=1, help="The word of the translation to predict, from 1; of an example the query.")
    ] = 1,
    kind: Annotated[
        Literal["cross", "self", "encoder"],
        typer.Option(help="Of a Transformer: attention to the source, to the words so far, or of the encoder."),
    ] = "cross",
    layer: Annotated[int | None, typer.Option(min=0, help="Of a Transformer, from 0. [default: the last]")] = None,
    head: Annotated[int | None, typer.Option(min=0, help="Of a Transformer, from 0. [default: 0]")] = None,
    source_word: Annotated[
        int, typer.Option(min=1, help="With --kind encoder: the source word whose attention is printed, from 1.")
    ] = 1,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help="Mark what another score or mask changes: score=dot, score=scaled_dot, scale=1 (no 1/√d), flip=KEY "
            "(whether the key of that number, from 1, is masked), add=KEY:NUMBER (to its score); of linear attention "
            "drop=KEY (masked for all queries). May be repeated.",
        ),
    ] = None,
    example: Annotated[
        str | None, typer.Option(metavar="NAME", help="A worked example with small whole numbers; `list` lists them.")
    ] = None,
    sheet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a sheet of exercises with answers: .html to print, or .csv."),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Of --sheet: the mechanisms, by the names of `--example list`. [default: luong-dot,"
            "scaled-dot-product,causal-mask]",
        ),
    ] = None,
    students: Annotated[
        int | None, typer.Option(min=1, help="Of --sheet: one for each student of a class, and one file of answers.")
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Mark sheets that were filled in, .csv or a folder of them: each cell, the first wrong step, and the "
            "likely mistake; may be repeated.",
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Open the live page, on this machine alone, until Ctrl-C.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the live page with its what-ifs as one file.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Of --serve. [default: any that is free]")] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="With --serve, print the address alone.")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the numbers of --sheet: each seed is another sheet. [default: 1]")
    ] = None,
    language: Annotated[Literal["en", "ko"], typer.Option("--lang", help="Language of titles and terms.")] = "en",
    output: Annotated[
        Literal["text", "markdown", "csv", "html", "json"], typer.Option("--format", help="How tables are printed.")
    ] = "text",
) -> None:
    """Print attention step by step: every number of one head, from the embeddings to the next word.

    regard steps "나는 학생이다" --lang ko prints the steps of Luong's decoder as textbooks number them: scores,
    distribution, context, concatenation, attentional vector, prediction. With --what-if all numbers that change are
    marked, down to the next word. Any two changes can be made together.

    --serve opens a page of the same tables for a class: sentence, mechanism, score and mask are changed in it. --html
    writes it as one file.

    --example prints a worked example that can be followed by hand, --sheet writes any of them with fresh numbers to be
    done by hand, and --check marks what was filled in. With --html FILE an example is a page of its own, for slides: a
    mask, a score and 1/√d are changed in it.
    """
    _check(sentence, example, sheet, check, html=html, serve=serve, port=port, no_open=no_open)
    _check_sheet(sheet, check, {"--topic": topic, "--students": students, "--seed": seed})
    if sheet is not None:
        _write_sheet(sheet, seed, topic, students, language)
        return
    if check is not None:
        emit([_marks(check, language, output)])
        return
    if example == "list":
        emit([f"{one}: {title[language]}" for one, title in _example_titles().items()])
        return
    from regard.steps.live_steps import LiveSteps, StepRequest

    changes = tuple(what_if or ())
    if example is not None:
        request = StepRequest(f"example:{example}", word=word, changes=changes)
    else:
        sentence = sentence or "나는 학생이다"
        name = _mechanism(sentence, score, checkpoint, head)
        request = StepRequest(name, sentence, word, kind, layer, head or 0, source_word, changes)
    live = LiveSteps(checkpoint, which, languages_of(languages))
    if html is not None:
        check_page_file(html)
        _write_page(live, request, language, html)
    elif serve:
        _serve(live, request, language, port, no_open)
    else:
        _print_steps(live, request, language, output)


def _check(
    sentence: str | None,
    example: str | None,
    sheet: Path | None,
    check: list[Path] | None,
    *,
    html: Path | None,
    serve: bool,
    port: int | None,
    no_open: bool,
) -> None:
    """Refuse options that contradict each other."""
    given = {"SENTENCE": sentence, "--example": example, "--sheet": sheet, "--check": check}
    asked = [name for name, value in given.items() if value]
    if len(asked) > 1 or not (asked or serve):
        raise CommandError(
            f"{' and '.join(asked) or 'nothing'} was given; it needs one of a sentence, --example NAME, --sheet FILE "
            "and --check FILE"
        )
    if serve and html is not None:
        raise CommandError("--serve shows the page and --html writes it: leave one of them out")
    if (sheet is not None or check) and (serve or html is not None):
        wrong, does = "--serve" if serve else "--html", "--check marks" if check else "--sheet writes"
        raise CommandError(f"{does} a sheet for paper, which is no page of {wrong}: leave {wrong} out")
    if not serve and (port is not None or no_open):
        wrong = "--port" if port is not None else "--no-open"
        raise CommandError(f"{wrong} is about a server, and nothing is served: add --serve, or leave {wrong} out")


def _check_sheet(sheet: Path | None, check: list[Path] | None, options: Mapping[str, object]) -> None:
    """Refuse options of a sheet where none is written."""
    wrong = [name for name, value in options.items() if value is not None]
    if sheet is None and wrong:
        of = "a sheet says itself which seed and topics it has" if check else "it is about the numbers of --sheet FILE"
        raise CommandError(f"{wrong[0]} was given without --sheet, and {of}: leave {wrong[0]} out")


def _mechanism(sentence: str, score: str | None, checkpoint: Path | None, head: int | None) -> str:
    """The name of the mechanism: that of --score, or one whose translator reads the sentence.

    Raises:
        CommandError: --score beside --checkpoint, --head of all heads, or a translator that does not read the
            sentence.
    """
    from regard.steps.installed_mechanisms import MECHANISMS, choose_mechanism
    from regard.steps.live_steps import CHECKPOINT

    if checkpoint is not None:
        if score is not None:
            raise CommandError(
                "--score chooses among the translators that regard comes with, and --checkpoint names another: leave "
                "one of them out, or ask --what-if score=NAME"
            )
        return CHECKPOINT
    chosen = choose_mechanism(sentence, score)
    if chosen.all_heads and head is not None:
        raise CommandError(
            f"--score {score} prints all heads, and --head {head} names one: leave --head out, or take --score "
            "scaled_dot"
        )
    return score or next(name for name, mechanism in MECHANISMS.items() if mechanism is chosen)


def _print_steps(live: LiveSteps, request: StepRequest, language: str, output: str) -> None:
    """Print the tables of a request, and on standard error what the change makes of the next word."""
    before, shown, warnings = live.walkthroughs(request)
    for warning in warnings:
        typer.echo(warning, err=True)
    if request.changes:
        if "prediction" in before.keys:
            for line in (_next_word("as trained", before), _next_word("changed", shown)):
                typer.echo(line, err=True)
        shown = shown.compared(before)
    emit([_formatted(shown, language, output)])


def _write_page(live: LiveSteps, request: StepRequest, language: str, path: Path) -> None:
    """Write the live page of a request as one file."""
    from regard.explorer.steps_page import steps_page

    page = steps_page(live, request, language)
    save_page(page, path)
    typer.echo(page.contents, err=True)
    emit([str(path)])


def _serve(live: LiveSteps, request: StepRequest, language: str, port: int | None, no_open: bool) -> None:
    """Serve the live page until Ctrl-C."""
    from regard.explorer.steps_server import StepsServer
    from regard_command.explore import serve

    live.answer(request)  # what is wrong with it is said here, and the page opens at once
    serve(StepsServer(live, port or 0, opening=request, language=language), no_open)


def _next_word(label: str, shown: Walkthrough) -> str:
    from regard.steps.live_steps import next_word

    found = next_word(shown)
    return f"{label}: the next word is {found['word']!r}, probability {found['probability']}"


def _example_titles() -> dict[str, dict[str, str]]:
    """The titles of the worked examples by language, from their file: importing regard would load torch for them."""
    import json

    file = Path(__file__).parents[1] / "regard" / "steps" / "worked_examples.json"
    return json.loads(file.read_text(encoding="utf-8"))


def _formatted(shown: Walkthrough, language: str, output: str) -> str:
    if output == "json":
        import json

        return json.dumps(shown.to_json(), ensure_ascii=False)
    return getattr(shown, output)(language)


def _write_sheet(path: Path, seed: int | None, topic: str | None, students: int | None, language: str) -> None:
    from regard.steps import make_class_sheets, make_worksheet
    from regard.steps.worksheet import TOPICS, check_ending

    check_ending(path)
    topics = TOPICS if topic is None else [name.strip() for name in topic.split(",") if name.strip()]
    seed = 1 if seed is None else seed
    if students is None:
        make_worksheet(seed, topics).save(path, language)
        emit([str(path)])
    else:
        emit(map(str, make_class_sheets(seed, students, topics).save(path, language)))


def _marks(paths: list[Path], language: str, output: str) -> str:
    """The marks of the sheets in files and folders."""
    from regard.steps import mark_sheet
    from regard.steps.answer_sheet import sheets_in
    from regard.steps.mark_report import marks_csv, marks_json, marks_text

    if output in ("markdown", "html"):
        raise CommandError(f"--check prints text, csv or json, and --format {output} was given: take one of those")
    sheets = [mark_sheet(path) for path in sheets_in(paths)]
    if output == "json":
        import json

        return json.dumps(marks_json(sheets), ensure_ascii=False)
    return marks_csv(sheets) if output == "csv" else marks_text(sheets, language)
