"""A model with a batch, called again and again with changed inputs."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError

SEQUENCES = (
    "decoder_input_ids",
    "input_ids",
    "decoder_inputs_embeds",
    "inputs_embeds",
    "tgt",
    "trg",
    "target",
    "tokens",
)
"""Names of the input whose positions the outputs belong to, in order of precedence."""
CACHES = ("past_key_values", "cache", "caches", "kv_cache", "past", "layer_past")
"""Names of the argument that takes what an earlier call returned."""
KEEP_MASKS = ("attention_mask",)
DROP_MASKS = ("key_padding_mask", "src_key_padding_mask", "padding_mask", "pad_mask")
SOURCES = ("input_ids", "src", "source", "input_features", "input_values", "context", "memory")
"""Names of the input that an encoder reads, in order of precedence."""
DOCUMENTS = ("document_ids", "doc_ids", "documents", "segment_ids", "sequence_ids", "seq_idx")
LARGEST_COPY = 200_000_000
"""Parameters up to which a model is copied to float64."""


class SkippedCheck(Exception):
    """A check that this model or batch has no use for, with the reason."""


def output_tensor(output: Any) -> Tensor | None:
    """The logits, the last hidden state, or the first tensor of what a model returned."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, Sequence) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The value with the function applied to all that is no mapping, list or tuple."""
    if isinstance(value, Mapping):
        return {name: _mapped(one, function) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        values = [_mapped(one, function) for one in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    return function(value)


def fresh(value: Any) -> Any:
    """The value with copies of the objects in it that a call could change: caches and sessions, no tensors."""

    def copied(one: Any) -> Any:
        is_fixed = one is None or isinstance(one, (Tensor, bool, int, float, str, torch.dtype, torch.device))
        return one if is_fixed else copy.deepcopy(one)

    return _mapped(value, copied)


@contextmanager
def hooks(model: nn.Module, after: Callable[..., None], before: Callable[[str], None] | None = None) -> Iterator[None]:
    """Call after(name, module, arguments, keywords, output) when a module has run, and before(name) when it starts."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(partial(after, name), with_kwargs=True))
        if before is not None:
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: before(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class InputNames:
    """What the arguments of a model mean, where their names do not say it; see `regard.doctor.examine`."""

    sequence: str | int | None = None
    vocabulary: int | None = None
    padding: str | Callable[[Tensor], Mapping[str, Any] | None] | None = None
    pad_token: int | None = None
    cache: str | None = None
    predicts_own: bool = False


class Subject:
    """A model in evaluation and its batch.

    The sequence is the one input whose positions are those of the outputs: token ids (batch, length) or embeddings
    (batch, length, ...). A model whose outputs have no such positions, as that of a classifier, is `pooled`: its
    outputs are one vector for each row; `is_subsampled` if they have positions of their own, as those of a speech
    encoder. `outputs(sequence, **keywords)` runs the model with another sequence; every call starts from the same
    random seed and from copies of the caches in the batch. causal, packed: as of `examine`. maps: whether checks
    measure the maps that show their findings. original: the subject in the model's own dtype, of one that was converted
    to float64. nan_outputs: numbers of NaN in the outputs so far, of this subject and its copies.
    """

    maps = False
    causal: bool | None = None
    packed: bool | None = None

    def __init__(self, model: nn.Module, batch: Any, names: InputNames | None = None) -> None:
        self.model, self.names = model, names or InputNames()
        if not isinstance(batch, Mapping):
            batch = dict(enumerate(batch if isinstance(batch, (list, tuple)) else (batch,)))
        self.inputs: dict[str | int, Any] = dict(batch)
        try:
            self.parameters = inspect.signature(model.forward).parameters
        except (TypeError, ValueError):
            self.parameters = {}
        self.original: Subject | None = None
        self.nan_outputs: list[int] = []
        self.dropouts = dropouts(model)
        self.pooled = False
        first = self._first_output()
        self.key = self._sequence_key(self.names.sequence, first)
        if not self.sequence.numel():
            raise ConfigurationError(f"the sequence {tuple(self.sequence.shape)} is empty; two positions are needed")
        self.same = tuple(key for key, value in self.inputs.items() if value is self.sequence)
        self.pooled = self.sequence.shape[:2] != first.shape[:2]
        self.is_subsampled = self.pooled and first.ndim > 2 and first.shape[0] == self.sequence.shape[0]
        self.output_length = first.shape[1] if first.ndim > 2 else self.length
        if self.batch_size == 1:
            self._double_rows()
        self.vocabulary, self.special = self.names.vocabulary, self._special_tokens()
        if self.vocabulary is None and self.is_tokens:
            self.vocabulary = self._measure_vocabulary()

    def _first_output(self) -> Tensor:
        try:
            output = output_tensor(self.run())
        except Exception as error:
            shapes = ", ".join(self._shapes()) or "no tensor"
            raise ConfigurationError(
                f"{type(self.model).__name__} does not run on the batch ({shapes}): {type(error).__name__}: {error}; "
                "pass what model(**batch), model(*batch) or model(batch) takes"
            ) from error
        if output is None or not output.is_floating_point() or output.ndim < 2:
            has = "no tensor" if output is None else f"{tuple(output.shape)} of {output.dtype}"
            raise ConfigurationError(
                f"{type(self.model).__name__} returns {has}; needed is a floating-point tensor with an output for each "
                "position, (batch, length, ...), or for each row, (batch, ...)"
            )
        if output.is_meta:
            raise ConfigurationError(
                f"{type(self.model).__name__} is on the meta device, without numbers: load its weights"
            )
        return output

    def _shapes(self) -> Iterable[str]:
        return (f"{name}: {tuple(value.shape)}" for name, value in self.inputs.items() if isinstance(value, Tensor))

    def _sequence_key(self, wanted: str | int | None, output: Tensor) -> str | int:
        tensors = {key: value for key, value in self.inputs.items() if isinstance(value, Tensor)}
        if wanted is not None:
            if wanted not in tensors:
                has = ", ".join(map(str, self.inputs))
                raise ConfigurationError(f"the batch has no tensor {wanted!r}, it has {has}")
            return wanted
        rows = {key: value for key, value in tensors.items() if value.shape[:1] == output.shape[:1]}
        readable = {
            key: value
            for key, value in rows.items()
            if (value.ndim > 2 if value.is_floating_point() else value.ndim == 2 and value.dtype != torch.bool)
            and not any(word in str(key) for word in ("mask", "position"))
            and key not in DOCUMENTS
        }
        if not readable and output.ndim > 2:  # samples of a sound, (batch, length)
            readable = {key: value for key, value in rows.items() if value.is_floating_point()}
        if not readable:
            raise ConfigurationError(
                f"no input has the rows of the output {tuple(output.shape)}: {', '.join(self._shapes())}; needed are "
                "token ids (batch, length) or embeddings (batch, length, dim), batch first"
            )
        aligned = [key for key, value in readable.items() if value.shape[:2] == output.shape[:2]]
        fitting = aligned or list(readable)
        last = fitting[-1] if 0 in self.inputs and aligned else fitting[0]
        return next((name for name in SEQUENCES if name in fitting), last)

    def _double_rows(self) -> None:
        def doubled(value: Tensor) -> Tensor:
            return value.repeat(2, *[1] * (value.ndim - 1)) if value.shape[:1] == (1,) else value

        other = self.with_tensors(doubled)
        with contextlib.suppress(Exception):  # of a model of one sequence at a time
            other.run()
            self.inputs = other.inputs

    def _special_tokens(self) -> frozenset[int]:
        config = getattr(self.model, "config", None)
        values = vars(config).items() if config is not None and hasattr(config, "__dict__") else ()
        tokens = [value for name, value in values if name.endswith(("token_id", "token_ids", "token_index"))]
        tokens.append(self.names.pad_token)
        flat = [token for value in tokens for token in (value if isinstance(value, list) else [value])]
        return frozenset(token for token in flat if isinstance(token, int))

    def _measure_vocabulary(self) -> int:
        """The rows of the embedding that reads the sequence."""
        sizes: list[int] = []

        def after(name: str, module: nn.Module, arguments: tuple[Any, ...], *_: Any) -> None:
            read = arguments[0] if arguments else None
            if isinstance(module, nn.Embedding) and isinstance(read, Tensor) and torch.equal(read, self.sequence):
                sizes.append(module.num_embeddings)

        with hooks(self.model, after):
            self.run()
        return min(sizes, default=int(self.sequence.max()) + 1)

    @property
    def sequence(self) -> Tensor:
        """The sequence of the batch."""
        return self.inputs[self.key]

    @property
    def keywords(self) -> dict[str, Any]:
        """The inputs that have a name."""
        return {name: value for name, value in self.inputs.items() if isinstance(name, str)}

    @property
    def is_tokens(self) -> bool:
        """Whether the sequence is token ids."""
        return not self.sequence.is_floating_point()

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.sequence.shape[0]

    @property
    def length(self) -> int:
        """Positions of the sequence."""
        return self.sequence.shape[1]

    @property
    def is_huggingface(self) -> bool:
        """Whether the model is one of transformers, with an attention that can be selected."""
        return hasattr(self.model, "set_attn_implementation") and hasattr(self.model, "config")

    def argument(self, names: Sequence[str]) -> str | None:
        """The first of the names that `forward` takes."""
        return next((name for name in names if name in self.parameters), None)

    def run(self, sequence: Tensor | None = None, *, seed: int = 0, **changes: Any) -> Any:
        """What the model returns for another sequence, and with other keywords; None takes a keyword away.

        It runs without gradients, from a random seed of its own.
        """
        others = {} if sequence is None else dict.fromkeys(self.same, sequence)  # the same as query, key and value
        inputs = {**fresh(self.inputs), **others, **changes}
        arguments = [value for name, value in inputs.items() if isinstance(name, int)]
        keywords = {name: value for name, value in inputs.items() if isinstance(name, str) and value is not None}
        devices = list({p.device for p in self.model.parameters() if p.device.type == "cuda"})
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            return self.model(*arguments, **keywords)

    @property
    def outputs_in_words(self) -> str:
        """How the outputs of a pooled model relate to its inputs."""
        if self.is_subsampled:
            return f"the model has {self.output_length} outputs for {self.length} positions"
        return "the model has one output for each row, not for each position"

    def outputs(self, sequence: Tensor | None = None, *, seed: int = 0, **changes: Any) -> Tensor:
        """The output for each position, (batch, length, features), or for each row, (batch, 1, features)."""
        return self.outputs_of(self.run(sequence, seed=seed, **changes))

    def outputs_of(self, returned: Any) -> Tensor:
        """The outputs in what the model returned, as of `outputs`."""
        found = output_tensor(returned)
        if found is None:
            raise ConfigurationError("the model returns a tensor for one input and none for another")
        if bool(found.isnan().any()):
            self.nan_outputs.append(int(found.isnan().sum()))
        if self.pooled:
            return found.flatten(1).unsqueeze(1)
        return found.flatten(2) if found.ndim > 2 else found.unsqueeze(-1)

    def others(self, sequence: Tensor, seed: int = 1, vocabulary: int | None = None) -> Tensor:
        """Another sequence of the same shape: each token is another one, and no special one."""
        generator = torch.Generator().manual_seed(seed)
        if sequence.is_floating_point():
            noise = torch.randn(sequence.shape, generator=generator, dtype=torch.float64).to(sequence)
            return noise * sequence.std().clamp(min=1e-3) + sequence.mean()
        allowed = [token for token in range(vocabulary or self.vocabulary or 2) if token not in self.special] or [0, 1]
        table = torch.tensor(allowed, device=sequence.device)
        drawn = torch.randint(len(allowed), sequence.shape, generator=generator).to(sequence.device)
        again = table[(drawn + 1) % len(allowed)]
        drawn = table[drawn]
        return torch.where(drawn == sequence, again, drawn).to(sequence.dtype)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Subject:
        """The same model with every tensor of its inputs changed."""
        other = copy.copy(self)
        other.inputs = _mapped(self.inputs, lambda value: change(value) if isinstance(value, Tensor) else value)
        return other

    def copied(self) -> Subject:
        """The same with a copy of the model."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).eval()
        return other

    def in_double(self) -> Subject:
        """The subject in float64 where it runs in it, and otherwise as it is."""
        if sum(parameter.numel() for parameter in self.model.parameters()) > LARGEST_COPY:
            return self
        with contextlib.suppress(Exception):  # of models that convert to float32 inside
            double = self.copied()
            double.model._apply(_doubled)
            double.inputs = _mapped(self.inputs, _doubled)
            double.original = self
            if double.outputs().dtype == torch.float64:
                return double
        return self


def _doubled(value: Any) -> Any:
    """A tensor of numbers, or a module among the inputs, in float64; complex ones, as rotary tables, in complex128."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value)._apply(_doubled)
    if not isinstance(value, Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def dropouts(model: nn.Module) -> dict[tuple[str, str], float]:
    """Numbers of modules whose name has 'drop' in it, and the p of dropout modules, by module and attribute."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and ("drop" in key or (key == "p" and isinstance(module, nn.modules.dropout._DropoutNd)))
    }


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation, and every module back into its mode, with the dropouts that it had."""
    modes = [(module, module.training) for module in model.modules()]
    before = dropouts(model)
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for (name, key), value in before.items():
            setattr(model.get_submodule(name), key, value)


def largest(difference: Tensor) -> float:
    """Largest absolute number, infinity where one is NaN."""
    if not difference.numel():
        return 0.0
    return float(difference.abs().nan_to_num(nan=torch.inf).max())
