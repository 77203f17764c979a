"""Write docs/every-mechanism.md and its Korean page from every_mechanism.toml: python recipes/every_mechanism.py."""

import html
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
ENGLISH, KOREAN = 0, 1
PAGES = "every-mechanism.md", "every-mechanism.ko.md"

TITLE = "Every mechanism", "모든 메커니즘"
OPENING = (
    """\
Attention as natural language processing has used it, a line for each mechanism: its formula, how it is written with
regard, and what computes it on a CPU. {here} of {all} are here; what is missing is said where it belongs.

$s_{{ij}}$ is the score of query i and key j, $w_{{ij}}$ its weight, and the output is $o_i = \\sum_j w_{{ij}} v_j$.
`q`, `k` and `v` are `(batch, heads, length, dim)`, `x` is the input of a layer. Each line runs as a test against its
formula in float64. Below it is the kernel; on a GPU `cpu_flash`, `additive` and `threshold` are code in Triton
([what else is](gpu.md)). The time grows with the pairs that the mask leaves, or with the length n where the table says
so; memory is linear in the length unless it says n². All lenses of `regard.lenses` read the weights unless it says
otherwise.""",
    """\
자연어 처리가 써 온 어텐션을 메커니즘마다 한 줄로 적었습니다. 수식, regard로 쓰는 법, CPU에서 계산하는 커널입니다.
{all}개 가운데 {here}개가 있고, 없는 것은 그 자리에 적었습니다.

$s_{{ij}}$는 질의 i와 키 j의 스코어, $w_{{ij}}$는 그 가중치이고 출력은 $o_i = \\sum_j w_{{ij}} v_j$입니다. `q`, `k`,
`v`의 모양은 `(batch, heads, length, dim)`이고 `x`는 층의 입력입니다. 모든 줄은 float64로 쓴 수식과 비교하는 테스트로
실행됩니다. 그 아래는 커널입니다. GPU에서 `cpu_flash`, `additive`, `threshold`는 Triton 코드입니다([나머지](gpu.md)).
시간은 마스크가 남기는 쌍의 수에, 표에 n이라고 적힌 곳에서는 길이 n에 비례합니다. n²라고 적히지 않았다면 메모리는
길이에 비례합니다. 따로 적지 않은 줄은 `regard.lenses`의 모든 렌즈가 가중치를 읽습니다.""",
)
COLUMNS = (
    ("mechanism", "formula", "with regard"),
    ("메커니즘", "수식", "regard로"),
)
SECTIONS = {
    "scores": ("Scores", "스코어"),
    "weights": ("From scores to weights", "스코어에서 가중치로"),
    "heads": ("Heads", "헤드"),
    "positions": ("Positions", "위치"),
    "pairs": ("Which pairs: masks", "어떤 쌍: 마스크"),
    "chosen": ("Chosen keys", "고른 키"),
    "memories": ("Caches and memories", "캐시와 메모리"),
    "recurrences": ("Linear attention and recurrences", "선형 어텐션과 순환"),
    "approximations": ("Approximations", "근사"),
    "models": ("Models", "모델"),
}
AUTHORS = (
    (
        "The authors' own code",
        """\
Where authors publish code that runs on a CPU, tests run it beside regard, forward or with gradients, in float32. The
difference is the largest of any case, as a share of the largest number; `tests/authors` skips what it does not find
(CONTRIBUTING.md says where it looks).""",
        ("code", "version", "compared", "largest difference"),
    ),
    (
        "저자들의 코드",
        """\
저자가 CPU에서 실행되는 코드를 공개한 것은 테스트가 regard와 나란히 float32로 실행해, 출력을 또는 기울기까지 비교합니다.
차이는 모든 경우 가운데 가장 큰 것이며 가장 큰 수에 대한 비입니다. `tests/authors`는 찾지 못한 것을 건너뜁니다.
찾는 곳은 CONTRIBUTING.md에 있습니다.""",
        ("코드", "버전", "비교한 것", "가장 큰 차이"),
    ),
)
WORDS = {
    "memory": ("memory", "메모리"),
    "lenses": ("lenses", "렌즈"),
    "missing": ("missing", "없음"),
    "none": ("none", "없음"),
}


def page(rows: Sequence[dict[str, Any]], peers: Sequence[dict[str, Any]], language: int) -> str:
    """The page in English or Korean."""
    here = sum(not is_missing(row) for row in rows)
    parts = [f"# {TITLE[language]}", OPENING[language].format(here=here, all=len(rows))]
    for section, title in SECTIONS.items():
        if own := [row for row in rows if row["section"] == section]:
            lines = [f"| {' | '.join(COLUMNS[language])} |", "| --- | --- | --- |"]
            parts += [f"## {title[language]}", "\n".join(lines + [line(row, language) for row in own])]
    parts += authors(peers, language)
    return "\n\n".join(parts) + "\n"


def authors(peers: Sequence[dict[str, Any]], language: int) -> list[str]:
    """What the code of authors was compared in."""
    title, opening, columns = AUTHORS[language]
    lines = [f"| {' | '.join(columns)} |", "| --- | --- | --- | --- |"]
    lines += [
        f"| [{peer['name']}]({peer['url']}) | {peer['version']} | {peer['compared'][language]} | "
        f"{peer['difference']:.1e} |"
        for peer in peers
    ]
    return [f"## {title}", opening, "\n".join(lines)]


def line(row: dict[str, Any], language: int) -> str:
    """A row of a table."""
    name = f"**{row['name'][language]}**<br>{row['paper']}" if row["paper"] != "-" else f"**{row['name'][language]}**"
    formula = f"${row['formula']}$" if row["formula"] != "-" else "–"
    return f"| {name} | {formula} | {written(row, language)} |"


def written(row: dict[str, Any], language: int) -> str:
    """How it is written with regard, what that takes, and what is missing."""
    parts = [code(row[key]) for key in ("here", "layer") if key in row]
    if "example" in row:
        parts.append(f"[`{row['example']}`]({row.get('page', 'examples.md')})")
    if of := price(row, language):
        parts.append(of)
    if "missing" in row:
        parts.append(f"{WORDS['missing'][language]}: {row['missing'][language]}")
    return "<br>".join(parts)


def price(row: dict[str, Any], language: int) -> str:
    """Its kernel, and what differs of cost, memory and lenses."""
    parts = [f"`{row['kernel']}`"] if "kernel" in row else []
    parts += [row["cost"]] if "cost" in row else []
    parts += [f"{WORDS['memory'][language]} {row['memory']}"] if "memory" in row else []
    if "lenses" in row:
        parts.append(f"{WORDS['lenses'][language]}: {WORDS.get(row['lenses'], (row['lenses'],) * 2)[language]}")
    return ", ".join(parts)


def code(expression: str) -> str:
    """Code in a table: a pipe in it would end the cell."""
    if "|" not in expression:
        return f"`{expression}`"
    escaped = html.escape(expression, quote=False)
    return f"<code>{''.join(f'&#{ord(letter)};' if letter in '|*_' else letter for letter in escaped)}</code>"


def is_missing(row: dict[str, Any]) -> bool:
    """Whether regard does not have it at all."""
    return not row.keys() & {"here", "layer", "example"}


if __name__ == "__main__":
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for language, name in enumerate(PAGES):
        (DOCS / name).write_text(page(data["mechanism"], data["peer"], language), encoding="utf-8")
