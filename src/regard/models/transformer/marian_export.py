"""The settings and tensors of a `MarianMTModel` of transformers that computes what a `Transformer` computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigurationError
from ...nn import SSRU, FeedForward, PostNorm
from ...positions import Sinusoidal, SplitSinusoidal
from .encoder_decoder import Decoder, Encoder, TiedOutput
from .marian_checkpoint import MARIAN_ACTIVATIONS, OUTPUT_BIAS, MarianSettings, marian_name
from .pretrained_settings import StackSizes
from .transformer import Transformer

_FEATURES_OUT = (".output.", ".down.", "norm.")
"""Of layers, those whose rows are features of the residual stream; of the others, and of tables, the columns are."""


def marian_settings(model: Transformer, max_positions: int) -> MarianSettings:
    """The settings of the `MarianMTModel` that computes the same.

    Raises:
        ConfigurationError: there is none, as norms come before attention, or positions are learned.
    """
    source, target = model.source_embedding, model.target_embedding
    dim = target.tokens.embedding_dim
    for embedding in (source, target):
        positions = embedding.positions
        if not isinstance(positions, Sinusoidal | SplitSinusoidal) or positions.base != 10000:
            raise _unlike(f"positions are {positions}", "Sinusoidal")
    if source.scale != target.scale or target.scale not in (1.0, dim**0.5):
        raise _unlike(f"embeddings are scaled by {source.scale:g} and {target.scale:g}", f"{dim**0.5:g} or 1 for both")
    activations = {name for stack in (model.encoder, model.decoder) for name in _activations(stack)}
    if len(activations) != 1:
        raise _unlike(f"activations are {', '.join(sorted(activations))}", "one for all layers")
    shared = source.tokens is target.tokens
    return MarianSettings(
        dim=dim,
        encoder=_stack(model.encoder),
        decoder=_stack(model.decoder),
        activation=activations.pop(),
        scale_embedding=target.scale != 1.0,
        shares_embeddings=shared and isinstance(model.output, TiedOutput),
        ties_output=isinstance(model.output, TiedOutput),
        source_size=source.tokens.num_embeddings,
        target_size=target.tokens.num_embeddings,
        max_positions=max_positions,
    )


def marian_tensors(model: Transformer, settings: MarianSettings) -> dict[str, Tensor]:
    """The tensors by the names of transformers, in float32.

    Where the positions are `Sinusoidal`, whose sines and cosines alternate, the features of the residual stream are put
    into the order of `SplitSinusoidal`: everything else a Transformer does is the same in any order of them.

    Raises:
        ConfigurationError: the model has parts without weights that a `MarianMTModel` has not, which is seen by other
            logits, or others in their place.
    """
    twin, state = settings.build().eval(), {name: tensor.float() for name, tensor in model.state_dict().items()}
    state.setdefault("output.bias", torch.zeros(settings.target_size))
    needed = twin.state_dict()
    if state.keys() != needed.keys():
        odd = sorted(state.keys() ^ needed.keys())
        raise _unlike(f"there {'is' if odd[0] in state else 'is no'} {odd[0]}", "the layers of Vaswani et al. (2017)")
    order = _order(model, settings.dim)
    ordered = {name: _ordered(name, tensor.cpu(), order) for name, tensor in state.items()}
    twin.load_state_dict(ordered)
    _check_same_logits(model, twin)
    tensors = {marian_name(name, settings): tensor for name, tensor in ordered.items()}
    tensors[OUTPUT_BIAS] = tensors[OUTPUT_BIAS][None]
    return tensors


def marian_config(settings: MarianSettings) -> dict[str, Any]:
    """The settings as config.json has them, without special ids.

    >>> small = StackSizes(1, 2, 16)
    >>> settings = MarianSettings(8, small, small, "relu", True, True, True, 20, 20, 64)
    >>> MarianSettings.read(marian_config(settings)) == settings
    True
    """
    stacks = {
        f"{part}_{name}": value
        for part, stack in (("encoder", settings.encoder), ("decoder", settings.decoder))
        for name, value in zip(
            ("layers", "attention_heads", "ffn_dim"), (stack.layers, stack.heads, stack.hidden_dim), strict=True
        )
    }
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "dtype": "float32",
        "vocab_size": settings.source_size,
        "decoder_vocab_size": settings.target_size,
        "d_model": settings.dim,
        **stacks,
        "activation_function": settings.activation,
        "scale_embedding": settings.scale_embedding,
        "static_position_embeddings": True,
        "max_position_embeddings": settings.max_positions,
        "share_encoder_decoder_embeddings": settings.shares_embeddings,
        "tie_word_embeddings": settings.ties_output,
    }


def _unlike(has: str, needs: str) -> ConfigurationError:
    return ConfigurationError(f"this model is no MarianMTModel: {has}, and that of transformers needs {needs}")


def _activations(stack: Encoder | Decoder) -> list[str]:
    names = []
    for block in stack.blocks:
        feed_forward: Any = block.feed_forward
        known = [name for name, function in MARIAN_ACTIVATIONS.items() if function is feed_forward.activation]
        if not isinstance(feed_forward, FeedForward) or not known:
            raise _unlike(f"a feed-forward layer is {feed_forward}", "FeedForward with relu, silu or gelu")
        names.append(known[0])
    return names


def _stack(stack: Encoder | Decoder) -> StackSizes:
    if not isinstance(stack.norm, nn.Identity):
        raise _unlike(f"there is a norm behind the last layer, {stack.norm}", "none, as with PostNorm")
    blocks: list[Any] = list(stack.blocks)
    for block in blocks:
        if isinstance(block.attention, SSRU):
            raise _unlike("a layer of the decoder has an SSRU, a recurrent layer", "self-attention there")
        if not isinstance(block.attention_residual, PostNorm):
            raise _unlike(f"the norms are those of {type(block.attention_residual).__name__}", "PostNorm")
        if not isinstance(block.attention_residual.norm, nn.LayerNorm):
            raise _unlike(f"a norm is {block.attention_residual.norm}", "nn.LayerNorm")
    sizes = {(block.attention.projections.num_heads, block.feed_forward.hidden_dim) for block in blocks}
    if len(sizes) != 1:
        raise _unlike("layers differ in their heads or hidden dims", "equal ones")
    return StackSizes(len(blocks), *sizes.pop())


def _order(model: Transformer, dim: int) -> Tensor:
    features = torch.arange(dim)
    return (
        features if isinstance(model.target_embedding.positions, SplitSinusoidal) else features.view(-1, 2).T.flatten()
    )


def _ordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """A parameter for features of the residual stream in another order."""
    if ".blocks." in name and any(part in name for part in _FEATURES_OUT):
        return tensor[order]
    return tensor[:, order] if tensor.ndim == 2 else tensor


@torch.no_grad()
def _check_same_logits(model: Transformer, twin: Transformer) -> None:
    """Compare both in double precision on tokens at random."""
    generator = torch.Generator().manual_seed(0)
    sizes = model.source_embedding.tokens.num_embeddings, model.target_embedding.tokens.num_embeddings
    source, target = (torch.randint(size, (2, 13), generator=generator) for size in sizes)
    lengths = torch.tensor([13, 7])
    device, dtype = model.target_embedding.tokens.weight.device, model.target_embedding.tokens.weight.dtype
    own = model(source.to(device), lengths.to(device), target.to(device)).double().cpu()
    other = twin.to(dtype)(source, lengths, target).double()
    twin.float()
    if not torch.allclose(own, other, rtol=0, atol=1e-3 * max(float(own.abs().max()), 1.0)):
        raise _unlike("it computes other logits, as with another score or normalizer", "softmax of q·k/√d")
