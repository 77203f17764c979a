"""One run of a comparison: train a variant with one seed, measure it, and write its record."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.comparison.gradient_norms import projection_gradients
from regard.comparison.quality import bleu_statistics, byte_statistics, cross_entropy_statistics, exact_statistics
from regard.comparison.recipe import MeasureName
from regard.comparison.run_record import RunKey, RunRecord
from regard.errors import ConfigurationError
from regard.language.language_experiment import LanguageExperiment
from regard.language.long_text import LongText
from regard.language.train_language_model import MODEL, train_language_model
from regard.models import LanguageModel
from regard.models.recurrent import copies_words
from regard.translation.batches import EncodedText, encode
from regard.translation.build_model import build_model
from regard.translation.data_split import evaluation_text
from regard.translation.experiment import Experiment
from regard.translation.training import train
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary

try:
    import resource
except ImportError:  # Windows, where the memory of a run is unknown
    resource = None


@dataclass(frozen=True)
class Job:
    """A run to be done: a variant with a seed, where it is trained, and the file of its record.

    measure, lengths, decode, gradients: as in `ComparisonSettings`; lengths: whether those of the sources are stored.
    """

    variant: str
    seed: int
    experiment: Experiment | LanguageExperiment
    key: RunKey
    folder: Path
    record: Path
    measure: MeasureName
    lengths: bool
    decode: int
    gradients: bool


def run_job(job: Job) -> RunRecord:
    """Train and measure one run in this process, on one thread, and write its record.

    A run whose training was interrupted is resumed from its last save.

    Raises:
        RegardError: the settings cannot be met, or the text cannot be read, as for `regard train`.
    """
    torch.set_num_threads(1)
    if isinstance(job.experiment, LanguageExperiment):
        record = _language_run(job, job.experiment)
    else:
        record = _translation_run(job, job.experiment)
    record.save(job.record, job.key)
    return record


def _translation_run(job: Job, experiment: Experiment) -> RunRecord:
    text = evaluation_text(experiment.data)
    if text is None:
        raise ConfigurationError("there is no text to measure on: write data.test, or data.split.test, into the recipe")
    before, processor = _peak_bytes(), time.process_time()
    result = train(experiment, job.folder, verbose=False)
    peak, processor = _peak_bytes(), time.process_time() - processor
    translator = Translator.load(job.folder, "best" if experiment.data.validates else "last")
    vocabularies = translator.source_vocabulary, translator.target_vocabulary
    own = cast(tuple[Vocabulary, Vocabulary], vocabularies)  # trained here: they are regard's
    encoded = encode(text, *own, copies=copies_words(translator.model))
    speed = None
    if job.measure == "cross-entropy":
        statistics = cross_entropy_statistics(cast(nn.Module, translator.model), encoded)
    else:
        start = time.perf_counter()
        translations = translator.translate(text.sources, observe=False)
        speed = len(text) / (time.perf_counter() - start)
        hypotheses = [one.text for one in translations]
        (job.folder / "test.hypotheses.txt").write_text("".join(f"{line}\n" for line in hypotheses), encoding="utf-8")
        count = bleu_statistics if job.measure == "bleu" else exact_statistics
        statistics = count(hypotheses, text.targets)
    return RunRecord(
        statistics,
        parameters=sum(one.numel() for one in translator.model.parameters()),
        updates=result.updates,
        seconds=result.seconds,
        cpu_seconds=processor,
        peak_bytes=None if peak is None or before is None else peak - before,
        lengths=encoded.sources.lengths.tolist() if job.lengths else [],
        speed=speed,
        gradients=_gradients(experiment, translator, encoded) if job.gradients else {},
        machine=machine(),
    )


def _gradients(experiment: Experiment, translator: Translator, text: EncodedText) -> dict[str, float]:
    """Gradients of the projections before training, by a model made as for it, and after it."""
    torch.manual_seed(experiment.seed)
    fresh = build_model(experiment.model, len(translator.source_vocabulary), len(translator.target_vocabulary))
    found = {"before": projection_gradients(fresh, text), "after": projection_gradients(translator.model, text)}
    return {f"{name}_{when}": value for when, values in found.items() for name, value in values.items()}


def _language_run(job: Job, experiment: LanguageExperiment) -> RunRecord:
    text = LongText.read(experiment.data)
    sequences = text.validation()
    if not sequences:
        raise ConfigurationError(
            "there is no text to measure on: write data.held_out, bytes at the end of the text, into the recipe"
        )
    before, processor = _peak_bytes(), time.process_time()
    result = train_language_model(experiment, job.folder, verbose=False)
    peak, processor = _peak_bytes(), time.process_time() - processor
    model = LanguageModel.load(job.folder / MODEL).eval()
    speed, cache = _decoding(model, sequences[0][:-1], job.decode) if job.decode else (None, None)
    return RunRecord(
        byte_statistics(model, sequences),
        parameters=sum(one.numel() for one in model.parameters()),
        updates=result.updates,
        seconds=result.seconds,
        cpu_seconds=processor,
        peak_bytes=None if peak is None or before is None else peak - before,
        speed=speed,
        cache_bytes=cache,
        machine=machine(),
    )


def _decoding(model: LanguageModel, prompt: Tensor, count: int) -> tuple[float, int]:
    """Bytes generated in a second after a prompt, by the median of `count` steps, and the bytes of the cache then."""
    seconds = []
    with torch.inference_mode():
        logits, cache = model.step(prompt[None], model.make_cache())
        for _ in range(count):
            start = time.perf_counter()
            logits, cache = model.step(logits[:, -1:].argmax(-1), cache)
            seconds.append(time.perf_counter() - start)
    return 1 / median(seconds), cache.nbytes


def machine() -> dict[str, Any]:
    """Processor, number of cores, and versions, for the footnote of times."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _peak_bytes() -> int | None:
    """The most memory that this process has had; None where the system does not say."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
