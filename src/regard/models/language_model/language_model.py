"""A decoder-only Transformer language model, and the loss of its training."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...attention import Observation
from ...errors import ConfigurationError, ShapeError
from ...lenses import Lens
from ...masks import Mask
from ...nn import BlockCache, CacheFormat, ProjectedMemory, TransformerBlock, WeighedCache, WeightPolicy
from ...nn.attention_layer import SharedCallKwargs
from ...nn.input_checks import probability
from ...nn.linear import Linear, linear
from ...nn.projections import init_xavier
from ...positions import Rotary
from ...utils.numbers import whole_number
from . import saved_model
from .block_passes import BlockPass, ObservedPass, ObservedStepPass, SequencePass, StepPass
from .chosen_keys import new_selections
from .config import LanguageModelConfig
from .continuous_batch import continued
from .drafts import Draft
from .generation import PROMPT_CHUNK, Sampling, generated
from .huggingface import read_checkpoint
from .language_model_cache import LanguageModelCache
from .token_inputs import check_cache, check_tokens, shared_rotations, stop_tokens, token_positions


class LanguageModel(nn.Module):
    """P(token t | tokens before t) = softmax(W norm(block_L(... block_1(E tokens)))): a decoder-only Transformer.

    Its configuration says what it is made of: norms, gated or plain feed-forward parts or a mixture of experts, heads
    in groups, rotary positions, and for each layer what it attends to. Blocks are `regard.nn.TransformerBlock`s in
    `blocks`, whose parts may be looked at and replaced.

    Shapes: tokens (batch, length), whole numbers; logits (batch, length, vocabulary_size). Embeddings start normal
    with deviation 1/√dim, matrices Xavier uniform.

    Raises:
        ConfigurationError: numbers that do not fit; the message of the part that refuses them.

    Source: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", section 3.1; with
    `PreNorm`, `RMSNorm`, SwiGLU and rotary positions as Llama (Touvron et al. 2023, arXiv 2302.13971, section 2.2).

    >>> from regard.models import language_model as lm
    >>> from regard.positions import Rotary
    >>> near, far = lm.LayerConfig(before=3, rotary=Rotary(8)), lm.LayerConfig(rotary=Rotary(8, base=1e6))
    >>> config = lm.LanguageModelConfig(
    ...     vocabulary_size=50,
    ...     dim=32,
    ...     layers=(near, far),
    ...     attention=lm.AttentionConfig(num_heads=4, num_kv_heads=2),
    ...     feed_forward=lm.GatedFeedForwardConfig(86),
    ... )
    >>> model = LanguageModel(config).eval()
    >>> tokens = torch.arange(14).view(2, 7)
    >>> logits = model(tokens)
    >>> first, cache = model.step(tokens[:, :4], model.make_cache())
    >>> last, cache = model.step(tokens[:, 4:], cache)
    >>> torch.allclose(torch.cat([first, last], 1), logits, atol=1e-5)
    True
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        if not isinstance(config, LanguageModelConfig):
            raise ConfigurationError(
                f"config is a {type(config).__name__}; a LanguageModel is made of a LanguageModelConfig, and read from "
                "a folder by LanguageModel.load(folder)"
            )
        self.config = config
        size, dim = whole_number("vocabulary_size", config.vocabulary_size), whole_number("dim", config.dim)
        self.embedding = nn.Embedding(size, dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.dropout = nn.Dropout(probability("dropout", config.dropout))
        self.blocks = nn.ModuleList(config.make_block(layer) for layer in config.layers)
        self.stream = config.make_stream()
        self._key_sources = config.key_sources
        self._owners = [number for number, layer in enumerate(config.layers) if layer.keys_from is None]
        self.norm = config.norm.make(dim)
        self.output = None if config.tied else Linear(dim, size, bias=False)
        if self.output is not None:
            init_xavier(self.output)

    def forward(self, tokens: Tensor, *, mask: Mask | Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits of the token after each token.

        Args:
            tokens: (batch, length).
            mask: which pairs exist, beside what each layer attends to: `masks.padding(lengths=...)` for padding,
                `masks.documents(ids)` for texts that are packed into one sequence, each of which is then read as if it
                were alone.
            positions: of the tokens, (length,) or (batch, length); without them 0..length-1. Masks count by them.

        Raises:
            ShapeError, DtypeError, DeviceError: tokens or positions that are not that.
            MaskError: a mask that does not fit.
        """
        return self.logits(self.features(tokens, mask=mask, positions=positions))

    def features(
        self,
        tokens: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
        call_block: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """The inputs of the output layer, (batch, length, dim), for callers that need the logits of some tokens only.

        call_block(block, x, **arguments) calls each block, as `torch.utils.checkpoint.checkpoint` does, which computes
        the activations of blocks again in the backward pass; without it `block(x, **arguments)`. Other arguments and
        errors are those of `forward`.
        """
        return self._through_blocks(SequencePass(call_block), tokens, mask, positions)

    def logits(self, features: Tensor) -> Tensor:
        """The output layer: (..., dim) to (..., vocabulary_size)."""
        logits = linear(features, self.embedding.weight) if self.output is None else self.output(features)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def observe(
        self, tokens: Tensor, *lenses: Lens, mask: Mask | Tensor | None = None, positions: Tensor | None = None
    ) -> LanguageModelObservation:
        """`forward`, and the lenses' results for every layer: `seen.logits`, `seen[lens]`, a tensor per layer."""
        observed = ObservedPass(lenses)
        features = self._through_blocks(observed, tokens, mask, positions)
        return LanguageModelObservation(self.logits(features), tuple(observed.seen))

    def make_cache(self, max_length: int | None = None, *, eviction: WeightPolicy | None = None) -> LanguageModelCache:
        """An empty cache, each layer's as long as its own mask needs; `max_length` as in `regard.nn.KVCache.rolling`.

        A layer with a window takes memory for the window, however long the text; one that reads the keys of another
        layer (`LayerConfig.keys_from`) has no cache.

        With `eviction`, `H2O`, `SnapKV` or `TOVA` of `regard.nn`, layers that attend to all tokens before have a
        `regard.nn.WeighedCache` of it, so that the memory of these is constant too: the outputs are then those of
        attention to what is kept. `generate(tokens, count, cache=model.make_cache(eviction=TOVA(512)))` uses it.

        Raises:
            ConfigurationError: eviction of keys that several layers read, or of a model with no layer for it.
        """
        weighed = () if eviction is None else self._layers_without_limit()

        def layer_cache(number: int) -> BlockCache:
            block: TransformerBlock = self.blocks[number]  # type: ignore[assignment]
            if eviction is not None and number in weighed:
                return BlockCache(WeighedCache(eviction))
            return block.make_cache(max_length=max_length)

        return LanguageModelCache(tuple(layer_cache(number) for number in self._owners))

    def step(
        self,
        tokens: Tensor,
        cache: LanguageModelCache,
        *,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, LanguageModelCache]:
        """Logits of the next tokens, one or many, and the cache with their keys and values appended.

        Steps give what `forward` gives for the whole. Arguments and errors are those of `forward`; positions that are
        not given follow the cache's. Padding on the left sits below position 0, with `~masks.prefix(0)` as the mask.

        Raises:
            ConfigurationError: a cache that is none of this model's.
        """
        features, cache = self.next_features(tokens, cache, mask=mask, positions=positions)
        return self.logits(features), cache

    def next_features(
        self,
        tokens: Tensor,
        cache: LanguageModelCache,
        *,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, LanguageModelCache]:
        """The inputs of the output layer for the next tokens, and the cache; see `features` and `step`."""
        check_cache(cache, len(self._owners))
        step = StepPass(self._owners, cache.layers)
        features = self._through_blocks(step, tokens, mask, positions, cache)
        return features, LanguageModelCache(step.extended())

    def observe_step(
        self,
        tokens: Tensor,
        cache: LanguageModelCache,
        *lenses: Lens,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[LanguageModelObservation, LanguageModelCache]:
        """`step`, and the lenses' results; the columns of a layer are the keys that its cache has."""
        check_cache(cache, len(self._owners))
        step = ObservedStepPass(self._owners, cache.layers, lenses)
        features = self._through_blocks(step, tokens, mask, positions, cache)
        return LanguageModelObservation(self.logits(features), tuple(step.seen)), LanguageModelCache(step.extended())

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop: int | Collection[int] = (),
        lengths: Tensor | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        chunk: int | None = None,
        captured: bool = False,
        cache: LanguageModelCache | None = None,
    ) -> Iterator[Tensor]:
        """Generate tokens, (batch,) at a time, each yielded as soon as it is computed.

        The model is used as it is: call `eval()` before, where it drops anything in training.

        Args:
            tokens: (batch, length), what to go on from.
            max_new_tokens: after so many it ends.
            sampling: how to draw; the likeliest token without it.
            stop: the token, or tokens, that end a sequence. Once all have ended, generation ends; a sequence that has
                repeats its last token until then.
            lengths: (batch,), a tensor or a list: how many tokens of each sequence are text. They count from the end:
                padding is on the left, so that all sequences continue at the same column. `masks.padding(lengths)`, for
                whole texts, counts from the start, with padding on the right. A warning follows where the tokens look
                padded on the right.
            generator: the source of what is drawn, seeded by whoever needs the same again.
            chunk: so many tokens of the beginning are read at once, which bounds the memory of reading it. Without it
                1,024; or all, where a rotary's frequencies depend on the length, as those of `DynamicNTK` and
                `LongRoPE` do.
            captured: each step is the same calls over memory for `max_new_tokens`, which is allocated at once; on CUDA
                they are captured as a graph, so that a token takes one launch. The tokens are the same. Where one model
                serves many such calls, each captures a graph of its own.
            cache: `make_cache()`, with an eviction for instance, or the cache of a text that the tokens continue; it
                stays as it is.

        Raises:
            ShapeError: no tokens to go on from, lengths that do not fit.
            ConfigurationError: numbers out of their range, a token to stop at that is none of the vocabulary; captured
                steps of linear attention, of a rotary whose frequencies depend on the length, or with an eviction;
                lengths of tokens that continue a text.

        >>> from regard.models import language_model as lm
        >>> attention, feed_forward = lm.AttentionConfig(num_heads=2), lm.FeedForwardConfig(16)
        >>> config = lm.LanguageModelConfig(9, 8, (lm.LayerConfig(),), attention, feed_forward)
        >>> model = LanguageModel(config).eval()
        >>> torch.stack(list(model.generate(torch.tensor([[3, 1, 4]]), 5)), 1).shape
        torch.Size([1, 5])
        """
        if captured:
            self._check_steps_are_alike()
        if cache is not None:
            check_cache(cache, len(self._owners))
        return generated(
            self,
            tokens,
            max_new_tokens,
            sampling=sampling,
            stop=stop_tokens(stop, self.config.vocabulary_size),
            lengths=lengths,
            generator=generator,
            chunk=self.prompt_chunk() if chunk is None else chunk,
            captured=captured,
            cache=cache,
        )

    def generate_many(
        self,
        texts: Iterable[Sequence[int] | Tensor],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop: int | Collection[int] = (),
        seeds: Iterable[int] | None = None,
        pages: int | None = None,
        draft: Draft | None = None,
        cache_format: CacheFormat | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Continue texts of any lengths together, each as `generate` continues it alone; yields (text, token).

        Texts that begin alike are read once. `ContinuousBatch` of `regard.models.language_model` takes texts while
        others are being continued, and ends some.

        Args:
            texts: of each its tokens, one at least.
            max_new_tokens: of each text.
            sampling: how to draw; the likeliest token without it.
            stop: the token, or tokens, that end a text.
            seeds: a seed for each text, of its own generator.
            pages: of the memory for all texts, of 64 tokens each; without it enough for all at once. With fewer some
                wait.
            draft: what proposes tokens that a step checks together: `PromptLookup` or `DraftModel`.
            cache_format: how keys and values are stored, each token by itself: `regard.nn.CacheFormat()` in 8 bits.

        Raises:
            ShapeError: a text without tokens, or with some that the vocabulary does not have.
            PagesExhausted: a text that does not fit into the memory even alone.
            ConfigurationError: numbers out of their range, as many seeds as there are no texts; a model whose layers
                store anything but keys and values of their own.

        >>> from regard.models import language_model as lm
        >>> attention, feed_forward = lm.AttentionConfig(num_heads=2), lm.FeedForwardConfig(16)
        >>> config = lm.LanguageModelConfig(9, 8, (lm.LayerConfig(),), attention, feed_forward)
        >>> model = LanguageModel(config).eval()
        >>> new = list(model.generate_many([[3, 1, 4], [1]], 5))
        >>> [sum(number == text for text, _ in new) for number in (0, 1)]
        [5, 5]
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise ShapeError(f"texts is {texts!r}; it needs a list with the tokens of each text")
        return continued(
            self,
            list(texts),
            max_new_tokens,
            sampling=sampling,
            stop=stop,
            seeds=seeds,
            pages=pages,
            draft=draft,
            cache_format=cache_format,
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the configuration and the weights into a folder, which is created if necessary.

        Whoever loads finds what was there before or what is new, whole, also after a crash halfway.

        Raises:
            CheckpointError: the folder cannot be written to.
            MissingExtra: safetensors is not installed.
        """
        saved_model.save(folder, self.config, self.state_dict())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> LanguageModel:
        """Load a model that `save` wrote, on the CPU, in its dtype, in evaluation mode.

        Raises:
            CheckpointError: it is missing, truncated or another kind of checkpoint.
            MissingExtra: safetensors is not installed.
        """
        config, path = saved_model.read(folder)
        model = cls._empty(config)
        model.load_state_dict(saved_model.weights(path, model.state_dict()), assign=True)
        return model.eval()

    @classmethod
    def from_huggingface(
        cls, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, ignore: Collection[str] = ()
    ) -> LanguageModel:
        """Load a model of transformers from a local folder with config.json and safetensors, in evaluation mode.

        Architectures, by the `model_type` in config.json, whatever the release is called: `llama` (Llama 1 to 3),
        `mistral`, `mixtral`, `gemma2`, `gemma3_text`, `gemma3n_text`, `gemma4_text`, `gemma4_unified_text`, `qwen2`
        (Qwen 1.5 to 2.5), `qwen2_moe`, `qwen3`, `qwen3_moe`, `qwen3_next`, `qwen3_5_text`, `olmo_hybrid`, `phi3`, and
        `gpt_oss`, also with its experts in MXFP4, which become plain numbers; of latent attention `deepseek_v2`,
        `deepseek_v3`, `deepseek_v32`, `glm4_moe_lite`, `glm_moe_dsa`, `kimi_linear` and `youtu`. transformers itself is
        not needed. Layers after the last one, which predict further tokens, are left out: no logit depends on them.

        Results are those of transformers, but for one case: a Phi 3 with LongRoPE whose text outgrows
        `original_max_position_embeddings` while it is generated. The long factors hold from that step on, for new
        queries and keys; keys in the cache stay rotated by the short ones, as in every step with a cache, there too.
        transformers' `generate` discards the cache at that one step and reads the whole text again, so its tokens may
        differ from there on. A prompt that is longer already is read with the long factors by both.

        Args:
            folder: where config.json is, and model.safetensors or model.safetensors.index.json with its parts.
            dtype: of all parameters; without one, that of the checkpoint's embedding.
            ignore: settings of config.json that are unknown here, and known to you to change nothing.

        Raises:
            CheckpointError: another architecture; tensors that are missing, extra or misshapen; a pickle; a setting
                that is not supported, by its name. Nothing in config.json that changes the result is ignored.
            MissingExtra: safetensors is not installed.
        """
        checkpoint = read_checkpoint(folder, ignore)
        model = cls._empty(checkpoint.config)
        model.load_state_dict(checkpoint.weights(model.state_dict(), dtype), assign=True)
        return model.eval()

    @classmethod
    def _empty(cls, config: LanguageModelConfig) -> LanguageModel:
        """A model whose parameters are on the meta device, to be assigned."""
        with torch.device("meta"):
            return cls(config)

    def _through_blocks(
        self,
        way: BlockPass,
        tokens: Tensor,
        mask: Mask | Tensor | None,
        positions: Tensor | None,
        cache: LanguageModelCache | None = None,
    ) -> Tensor:
        """The inputs of the output layer, by a pass through all blocks; `cache` is that before the tokens."""
        check_tokens(tokens, self.config.vocabulary_size, self.embedding.weight.device)
        at, embedded = token_positions(tokens, positions, cache), self._embed(tokens)
        rotations = shared_rotations(self._rotaries(), at, embedded.dtype)
        x, inputs = self.stream.begin(tokens, embedded)
        shared: dict[int, ProjectedMemory] = {}
        selections = new_selections(self.config.layers)

        def output(number: int, x: Tensor) -> Tensor:
            block: TransformerBlock = self.blocks[number]  # type: ignore[assignment]
            call: SharedCallKwargs = {"mask": mask, "positions": positions, "rotation": rotations[number]}
            source = self._key_sources[number]
            if source is not None:
                if source == number:
                    shared[number] = way.keys(number, block, x, call)
                # Positions 0..N-1 are the default, which has faster kernels.
                call["positions"] = None if shared[source].positions is None else at
                call["keys"] = shared[source]
            if (selection := selections[number]) is not None:
                call["selection"] = selection
            return way.output(number, block, x, call)

        for number in range(len(self.blocks)):
            x = self.stream.around(number, x, inputs, partial(output, number))
        return self.norm(self.stream.end(x))

    def _embed(self, tokens: Tensor) -> Tensor:
        """The embeddings of tokens, scaled, with dropout: (batch, length, dim)."""
        embedded = self.embedding(tokens)
        if self.config.embedding_scale is not None:
            # Rounded to the dtype of the weights before it multiplies, as Gemma was trained.
            embedded = embedded * embedded.new_tensor(self.config.embedding_scale)
        return self.dropout(embedded)

    def prompt_chunk(self) -> int | None:
        """The prompt tokens per forward pass that leave the result unchanged; None where all have to be in one."""
        scalings = [rotary.scaling for rotary in self._rotaries() if rotary is not None]
        return None if any(scaling is not None and scaling.reads_length for scaling in scalings) else PROMPT_CHUNK

    def _check_steps_are_alike(self) -> None:
        """Check that each step of generation is the same calls, as captured steps have to be.

        Raises:
            ConfigurationError: the frequencies of a rotary depend on the length, which is no number of a graph.
        """
        if self.prompt_chunk() is None:
            raise ConfigurationError(
                "the frequencies of this model's rotary depend on the length of the text, so that its steps differ: "
                "leave captured out"
            )

    def _layers_without_limit(self) -> list[int]:
        """The layers of softmax attention to all tokens before, whose keys an eviction by weight can choose from.

        Raises:
            ConfigurationError: there are none; other layers read the keys of one of them, or those that it has chosen.
        """
        layers = self.config.layers
        reader = next((number for number, layer in enumerate(layers) if layer.chosen_by is not None), None)
        if reader is not None:
            raise ConfigurationError(
                f"layer {reader} attends to the keys that layer {layers[reader].chosen_by} has chosen by columns, "
                "which differ where each layer evicts by weights of its own: leave eviction out"
            )
        found = [number for number in self._owners if layers[number].before is None and layers[number].linear is None]
        shared = next((number for number in found if self._key_sources[number] is not None), None)
        if shared is not None:
            raise ConfigurationError(
                f"other layers read the keys of layer {shared}, which cannot be evicted by the weights of one of them: "
                "leave eviction out"
            )
        if not found:
            raise ConfigurationError(
                "no layer of this model attends to all tokens before, so that caches have a limit already: leave "
                "eviction out"
            )
        return found

    def _rotaries(self) -> list[Rotary | None]:
        """The rotary embedding of each layer."""
        return [block.attention.rotary for block in self._blocks()]  # type: ignore[attr-defined]

    def _blocks(self) -> Iterator[TransformerBlock]:
        yield from self.blocks  # type: ignore[misc]

    def extra_repr(self) -> str:
        return f"vocabulary_size={self.config.vocabulary_size}, dim={self.config.dim}, tied={self.config.tied}"


@dataclass(frozen=True, eq=False)
class LanguageModelObservation:
    """Logits, and the results of lenses: `observation[lens]` has one tensor for each layer, the first layer first."""

    logits: Tensor
    layers: tuple[Observation, ...]

    def __getitem__(self, lens: Lens) -> tuple[Tensor, ...]:
        return tuple(layer[lens] for layer in self.layers)


def next_token_loss(logits: Tensor, tokens: Tensor, counted: Tensor | None = None) -> Tensor:
    """The mean of -log p(token t | tokens before t), over t = 1..length - 1: a number, in nats, float32 at least.

    Shapes: logits (batch, length, vocabulary), as the model gives them for these tokens (batch, length). `counted`
    (batch, length), bool, says which tokens are to be predicted: not padding, and of documents that are packed into
    one sequence not the first token of each. The first token of a sequence is predicted from nothing and never counts.

    Raises:
        ShapeError: shapes that do not fit; nothing is counted.

    >>> import torch
    >>> next_token_loss(torch.zeros(1, 3, 8), torch.tensor([[1, 2, 3]])).exp()
    tensor(8.)
    """
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape or (counted is not None and counted.shape != tokens.shape):
        mask = "" if counted is None else f" and counted {tuple(counted.shape)}"
        raise ShapeError(
            f"logits have the shape {tuple(logits.shape)}, tokens {tuple(tokens.shape)}{mask}; they need (batch, "
            "length, vocabulary) and (batch, length)"
        )
    predicted, targets = logits[:, :-1], tokens[:, 1:]
    if counted is not None:
        predicted, targets = predicted[counted[:, 1:]], targets[counted[:, 1:]]
    if not targets.numel():
        raise ShapeError("no token is counted: a loss needs sequences of two tokens or more, and some that count")
    wide = predicted if predicted.dtype.itemsize >= 4 else predicted.float()
    return functional.cross_entropy(wide.flatten(0, -2), targets.flatten())
