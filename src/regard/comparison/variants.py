"""The variants of a comparison: short names and key paths of what varies, and the experiment of each variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml
from pydantic import ValidationError

from regard.comparison.recipe import Recipe
from regard.errors import ConfigurationError, nearest
from regard.language.language_experiment import TASKS, LanguageExperiment
from regard.translation import yaml12
from regard.translation.config_errors import unknown_keys, wrong_values
from regard.translation.experiment import TRANSLATION, Experiment, set_value

AnyExperiment: TypeAlias = "Experiment | LanguageExperiment"

TRANSFORMER = "transformer"
RECURRENT = "recurrent"
LANGUAGE = "language-model"


@dataclass(frozen=True)
class Variant:
    """One variant: its name, the values that it sets by key path, and its experiment with the recipe's own seed.

    `reason` says why it cannot be trained; then there is no experiment.
    """

    name: str
    values: Mapping[str, Any]
    experiment: AnyExperiment | None
    reason: str | None = None


@dataclass(frozen=True)
class ShortName:
    """What a short name varies: a key path, its usual values, and how a value becomes that of the key."""

    path: str
    values: tuple[Any, ...]
    expand: Callable[[Any, Mapping[str, Any]], Any] | None = None

    def value(self, value: Any, experiment: Mapping[str, Any]) -> Any:
        """The value of the key path, from one as the user writes it."""
        return value if self.expand is None else self.expand(value, experiment)


def _all_layers(value: Any, experiment: Mapping[str, Any]) -> list[Any]:
    """A list with this value for each layer of a language model."""
    model = experiment.get("model")
    layers = model.get("layers") if isinstance(model, Mapping) else None
    return [value] * (len(layers) if isinstance(layers, list) and layers else 4)


def _windows(value: Any, experiment: Mapping[str, Any]) -> list[Any]:
    """A list with a window of so many earlier tokens, or "all" of them, for each layer of a language model."""
    if value != "all" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigurationError(
            f"--vary window: has {value!r}; it needs whole numbers of earlier tokens, or all, such as window=16,64,all"
        )
    return _all_layers("causal" if value == "all" else {"kind": "window", "before": value}, experiment)


SHORT_NAMES: dict[str, dict[str, ShortName]] = {
    RECURRENT: {
        "score": ShortName("model.decoder.score", ("dot", "scaled_dot", "general", "additive", "concat", "location")),
        "mechanism": ShortName("model.decoder", ("bahdanau", "luong")),
        "window": ShortName("model.decoder.window", ("global", "local-m", "local-p")),
        "coverage": ShortName("model.decoder.coverage", ("none", "sum", "fertility", "gru")),
    },
    TRANSFORMER: {
        "heads": ShortName("model.num_heads", (1, 2, 4, 8)),
        "score": ShortName("model.score", ("scaled_dot", "dot")),
        "position": ShortName("model.positions", ("sinusoidal", "rotary", "learned", "alibi", "none")),
        "mechanism": ShortName("model.encoder_attention", ("softmax", "linear", "performer", "linformer")),
    },
    LANGUAGE: {
        "heads": ShortName("model.num_heads", (1, 2, 4, 8)),
        "kv_heads": ShortName("model.num_kv_heads", (4, 2, 1)),
        "window": ShortName("model.layers", (16, 64, 256, "all"), _windows),
        "mask": ShortName("model.layers", ("causal", "window", {"kind": "window", "prefix": 0}), _all_layers),
        "mechanism": ShortName("model.layers", ("causal", "window", "linear"), _all_layers),
    },
}
"""Short names of `--vary` by model: those of the recurrent translator, the Transformer, and the language model."""


def parse_vary(text: str) -> tuple[str, list[Any] | None]:
    """Read `NAME` or `NAME=VALUE,VALUE`; values are YAML, and None stands for those of a short name.

    Raises:
        ConfigurationError: there is no name, the values are no YAML, or there are none.

    >>> parse_vary("model.num_heads=1,2"), parse_vary("score")
    (('model.num_heads', [1, 2]), ('score', None))
    >>> parse_vary("score=dot,{kind: additive, hidden_dim: 8}")[1][1]
    {'kind': 'additive', 'hidden_dim': 8}
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    if not name:
        raise ConfigurationError(
            f"--vary {text!r} names nothing to vary; it needs a short name or a key path, such as score=dot,general"
        )
    if not equals:
        return name, None
    try:
        parsed = yaml12.parse(f"[{values}]")
    except yaml.YAMLError:
        raise ConfigurationError(
            f"--vary {text!r}: the values are no YAML; write them with commas between, such as {name}=1,2"
        ) from None
    if not isinstance(parsed, list) or not parsed:
        raise ConfigurationError(f"--vary {text!r} has no values; write some, such as {name}=1,2, or {name} alone")
    return name, parsed


def make_variants(recipe: Recipe) -> list[Variant]:
    """All variants of a recipe: every combination of its named variants and of the values that vary.

    A variant whose settings exclude each other has a reason in place of an experiment.

    Raises:
        ConfigurationError: nothing varies, or there is one variant alone; there is no such short name or key; a value
            is mistyped or out of range, or there twice; the baseline is no variant.

    >>> from regard.comparison.recipe import load_recipe
    >>> recipe = load_recipe("dates", options={"vary": {"score": ["dot", "general"]}})
    >>> [(variant.name, dict(variant.values)) for variant in make_variants(recipe.with_corpus(folder))]
    ... # doctest: +SKIP
    [('dot', {'model.decoder.score': 'dot'}), ('general', {'model.decoder.score': 'general'})]
    """
    settings = recipe.compare
    axes: list[list[tuple[str, dict[str, Any]]]] = []
    if settings.variants:
        axes.append(list(settings.variants.items()))
    alone = len(settings.vary) == 1 and not settings.variants
    for name, values in settings.vary.items():
        axes.append(_axis(recipe, name, values, alone=alone))
    if not axes:
        names = ", ".join(_short_names(recipe))
        raise ConfigurationError(
            f"{recipe.origin}: nothing varies; name what does with --vary, a short name ({names}) or the path of a "
            "key with its values, such as training.learning_rate=1e-2,1e-3, or write compare.vary into the recipe"
        )
    combined: dict[str, dict[str, Any]] = {}
    for parts in itertools.product(*axes):
        name = ", ".join(part for part, _ in parts)
        if name in combined:
            raise ConfigurationError(f"{recipe.origin}: the variant {name!r} is there twice; leave one out")
        combined[name] = {key: value for _, values in parts for key, value in values.items()}
    if len(combined) < 2:
        raise ConfigurationError(
            f"{recipe.origin}: there is one variant, {next(iter(combined))!r}; a comparison needs two or more: name "
            "more values"
        )
    if settings.baseline is not None and settings.baseline not in combined:
        raise ConfigurationError(
            f"{recipe.origin}: compare.baseline: there is no variant {settings.baseline!r}; "
            f"{nearest(settings.baseline, combined)}"
        )
    return [_variant(recipe, name, values) for name, values in combined.items()]


def _model_kind(recipe: Recipe) -> str:
    if recipe.task != TRANSLATION:
        return LANGUAGE
    model = recipe.experiment.get("model", RECURRENT)
    kind = model.get("kind", RECURRENT) if isinstance(model, Mapping) else model
    return TRANSFORMER if kind == TRANSFORMER else RECURRENT


def _short_names(recipe: Recipe) -> dict[str, ShortName]:
    return SHORT_NAMES[_model_kind(recipe)]


def _axis(recipe: Recipe, name: str, values: Sequence[Any] | None, *, alone: bool) -> list[tuple[str, dict[str, Any]]]:
    """The variants that one name makes: what each is called, and the value of its key."""
    short = _short_names(recipe).get(name)
    if short is None and "." not in name and name not in TASKS[recipe.task].model_fields:
        elsewhere = [kind for kind, names in SHORT_NAMES.items() if name in names]
        hint = f"it is one of {' and '.join(elsewhere)} models; " if elsewhere else ""
        raise ConfigurationError(
            f"{recipe.origin}: --vary {name}: {_model_kind(recipe)} models have no such short name; {hint}"
            f"{nearest(name, _short_names(recipe))}, or the path of a key, such as training.learning_rate=1e-2,1e-3"
        )
    if values is None:
        if short is None:
            raise ConfigurationError(
                f"{recipe.origin}: --vary {name}: a key path needs its values, such as {name}=1,2; short names have "
                f"values of their own: {', '.join(_short_names(recipe))}"
            )
        values = short.values
    if not values:
        raise ConfigurationError(f"{recipe.origin}: compare.vary.{name}: has no values; name two or more")
    path = name if short is None else short.path
    expanded = [value if short is None else short.value(value, recipe.experiment) for value in values]
    label = "" if alone else f"{name.rsplit('.', 1)[-1]}="
    return [(f"{label}{_value_name(value)}", {path: one}) for value, one in zip(values, expanded, strict=True)]


def _value_name(value: Any) -> str:
    """What a variant with this value is called: the value, or the kind of a section with its other keys.

    >>> _value_name({"kind": "local-p", "radius": 5}), _value_name([1, 2]), _value_name(None)
    ('local-p radius=5', '1 2', 'null')
    """
    if isinstance(value, Mapping):
        rest = [f"{key}={_value_name(one)}" for key, one in value.items() if key != "kind"]
        return " ".join([str(value["kind"]), *rest] if "kind" in value else rest)
    if isinstance(value, list):
        return " ".join(map(_value_name, value))
    return yaml12.dump(value).removesuffix("...\n").strip() if value is None or isinstance(value, bool) else str(value)


def _variant(recipe: Recipe, name: str, values: Mapping[str, Any]) -> Variant:
    """A variant, whose settings are checked."""
    data = dict(recipe.experiment)
    for path, value in values.items():
        keys = path.split(".")
        if not all(keys):
            raise ConfigurationError(f"{recipe.origin}: --vary {path!r} is no path of keys such as model.num_heads")
        set_value(data, keys, value, f"{recipe.origin}: --vary {path}")
    kind = TASKS[recipe.task]
    origin = f"{recipe.origin}, variant {name!r}"
    data = kind.completed(data, origin)
    if problems := list(unknown_keys(data, kind, root=kind)):
        raise ConfigurationError(_listed(origin, problems))
    try:
        return Variant(name, values, kind.model_validate(data))
    except ValidationError as error:
        problems = list(wrong_values(error, data))
        # A rule about several keys is about this variant; a value that a key cannot have is a mistake of the recipe.
        if any(detail["type"] != "value_error" for detail in error.errors(include_url=False)):
            raise ConfigurationError(_listed(origin, problems)) from None
        return Variant(name, values, None, "; ".join(problems))


def _listed(origin: str, problems: Iterable[str]) -> str:
    return "\n".join(f"{origin}: {problem}" for problem in problems)
