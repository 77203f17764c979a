"""Build a model from the `model` section of an experiment."""

from __future__ import annotations

import torch
from torch import nn

from regard.biases import alibi
from regard.errors import ConfigurationError
from regard.masks import Mask, causal
from regard.models import RecurrentTranslator, Transformer, recurrent, transformer
from regard.models.language_model.config import LINEAR_FEATURE_MAPS
from regard.models.recurrent.decoders import READOUTS
from regard.models.recurrent.source_attention import SourceAttention
from regard.nn import (
    SSRU,
    Attention,
    FeedForward,
    LengthProjection,
    LinearAttention,
    LinformerAttention,
    PerformerAttention,
    PostNorm,
    PreNorm,
    Projections,
    RelativeAttention,
    TransformerBlock,
)
from regard.normalizers import Normalizer
from regard.positions import Learned, Rotary, Sinusoidal
from regard.scores import Additive, Concat, Dot, General, Location, ScaledDot, Score
from regard.translation import settings as sections


def build_model(
    settings: sections.RecurrentSettings | sections.TransformerSettings, source_size: int, target_size: int
) -> RecurrentTranslator | Transformer:
    """The model that the settings describe, for vocabularies of these sizes, freshly initialised.

    Raises:
        ConfigurationError: sizes that cannot meet, such as a dot product of a state and an annotation of other width,
            or a pointer from one vocabulary into another.
    """
    if isinstance(settings, sections.TransformerSettings):
        return _build_transformer(settings, source_size, target_size)
    return _build_recurrent(settings, source_size, target_size)


def _build_transformer(settings: sections.TransformerSettings, source_size: int, target_size: int) -> Transformer:
    if settings.shared_embeddings == "all" and source_size != target_size:
        raise ConfigurationError(
            f"model.shared_embeddings 'all' is one table for both sides, but the vocabularies have {source_size:,} and "
            f"{target_size:,} entries: they need to be one"
        )
    target = _build_embedding(settings, target_size)
    shares_source = settings.shared_embeddings == "all"
    source = _build_embedding(settings, source_size, target.tokens if shares_source else None)
    if settings.shared_embeddings == "none":
        output = nn.Linear(settings.dim, target_size, bias=False)
        nn.init.normal_(output.weight, std=settings.dim**-0.5)
    else:
        output = transformer.TiedOutput(target.tokens)
    # The target's BEGIN takes a position, and pairs are cut on both sides alike.
    learned = (
        settings.positions.length - 1 if isinstance(settings.positions, sections.LearnedPositionSettings) else None
    )
    limits = [limit for limit in (settings.max_source_length, learned) if limit is not None]
    mixtures = _build_mixtures(settings)
    return Transformer(
        source,
        target,
        encoder=transformer.Encoder(
            [_build_block(settings, mixtures=mixtures) for _ in range(settings.encoder_layers)], _last_norm(settings)
        ),
        decoder=transformer.Decoder(
            [_build_block(settings, decoder=True) for _ in range(settings.decoder_layers)], _last_norm(settings)
        ),
        output=output,
        max_source_length=min(limits, default=None),
    )


def _build_embedding(
    settings: sections.TransformerSettings, size: int, tokens: nn.Embedding | None = None
) -> transformer.Embedding:
    """Embeddings with a shared table, or a new one of normal numbers with deviation 1/√dim."""
    if tokens is None:
        tokens = nn.Embedding(size, settings.dim, padding_idx=0)
        nn.init.normal_(tokens.weight, std=settings.dim**-0.5)
        nn.init.zeros_(tokens.weight[0])
    positions = None
    if isinstance(settings.positions, sections.LearnedPositionSettings):
        positions = Learned(settings.positions.length, settings.dim)
    elif settings.positions.kind == "sinusoidal":
        positions = Sinusoidal(settings.dim)
    return transformer.Embedding(tokens, positions, dropout=settings.dropout)


def _build_block(
    settings: sections.TransformerSettings, *, decoder: bool = False, mixtures: LengthProjection | None = None
) -> TransformerBlock:
    kind = PostNorm if settings.norm == "post" else PreNorm
    return TransformerBlock(
        _build_decoder_attention(settings) if decoder else _build_encoder_attention(settings, mixtures),
        FeedForward(settings.dim, settings.hidden_dim, dropout=settings.activation_dropout),
        lambda: kind(nn.LayerNorm(settings.dim), settings.dropout),
        cross_attention=_build_cross_attention(settings) if decoder else None,
    )


def _build_decoder_attention(settings: sections.TransformerSettings) -> Attention | RelativeAttention | SSRU:
    """What a decoder block has in the place of self-attention."""
    return SSRU(settings.dim) if settings.decoder_attention == "ssru" else _build_softmax_attention(settings, causal())


def _build_softmax_attention(
    settings: sections.TransformerSettings, mask: Mask | None = None
) -> Attention | RelativeAttention:
    """Self-attention with the positions of the settings."""
    if isinstance(settings.positions, sections.RelativePositionSettings):
        return RelativeAttention(
            _build_projections(settings),
            before=settings.positions.distance,
            after=settings.positions.distance if mask is None else 0,
            values=settings.positions.values,
            mask=mask,
            dropout=settings.attention_dropout,
        )
    positions = settings.positions.kind
    return Attention(
        _build_projections(settings),
        score=_build_transformer_score(settings),
        mask=mask,
        bias=alibi(settings.num_heads) if positions == "alibi" else None,
        rotary=Rotary(settings.features_per_head) if positions == "rotary" else None,
        dropout=settings.attention_dropout,
        normalizer=_build_normalizer(settings),
    )


def _build_cross_attention(settings: sections.TransformerSettings) -> Attention:
    return Attention(
        _build_projections(settings),
        score=_build_transformer_score(settings),
        dropout=settings.attention_dropout,
        normalizer=_build_normalizer(settings),
    )


def _build_normalizer(settings: sections.RecurrentSettings | sections.TransformerSettings) -> Normalizer | None:
    """What takes the place of softmax in all attention; None for softmax."""
    config = sections.normalizer_config(settings.normalizer)
    return None if config is None else config.make()


def _build_transformer_score(settings: sections.TransformerSettings) -> Score | None:
    """The score of all attention; None for the default, q·k/√head_dim."""
    return Dot() if settings.score == "dot" else None


def _build_encoder_attention(
    settings: sections.TransformerSettings, mixtures: LengthProjection | None
) -> Attention | RelativeAttention | LinearAttention | LinformerAttention:
    """The self-attention of an encoder block; `mixtures` are those of Linformer, which its blocks share."""
    attention = settings.encoder_attention
    if mixtures is not None:
        return LinformerAttention(_build_projections(settings), mixtures)
    rotary = Rotary(settings.features_per_head) if settings.positions.kind == "rotary" else None
    if isinstance(attention, sections.LinearAttentionSettings):
        feature_map = LINEAR_FEATURE_MAPS[attention.feature_map]
        return LinearAttention(_build_projections(settings), feature_map=feature_map, rotary=rotary)
    if isinstance(attention, sections.PerformerSettings):
        return PerformerAttention(_build_projections(settings), num_features=attention.num_features, rotary=rotary)
    return _build_softmax_attention(settings)


def _build_mixtures(settings: sections.TransformerSettings) -> LengthProjection | None:
    """Linformer's projection along the length; None for other attention."""
    attention = settings.encoder_attention
    if not isinstance(attention, sections.LinformerSettings):
        return None
    # The settings refuse Linformer without a length; 1 only satisfies the type.
    return LengthProjection(settings.max_source_length or 1, attention.rank)


def _build_projections(settings: sections.TransformerSettings) -> Projections:
    """Projections with W_q, W_k, W_v scaled by 1/√2: initialised as one stacked matrix, as in torch and fairseq."""
    projections = Projections(settings.dim, settings.num_heads, head_dim=settings.head_dim)
    with torch.no_grad():
        for linear in (projections.query, projections.key, projections.value):
            linear.weight.mul_(2**-0.5)
    return projections


def _last_norm(settings: sections.TransformerSettings) -> nn.Module | None:
    """The last norm of a stack of pre-norm blocks; post-norm blocks have their own."""
    return nn.LayerNorm(settings.dim) if settings.norm == "pre" else None


def _build_recurrent(settings: sections.RecurrentSettings, source_size: int, target_size: int) -> RecurrentTranslator:
    if settings.hidden_dim % 2:
        raise ConfigurationError(
            f"model.hidden_dim is {settings.hidden_dim}; it needs to be even: each direction of the encoder takes half"
        )
    encoder = recurrent.BidirectionalEncoder(
        settings.embedding_dim,
        settings.hidden_dim // 2,
        cell=settings.cell,
        layers=settings.encoder_layers,
        dropout=settings.dropout,
    )
    return RecurrentTranslator(
        source_size,
        target_size,
        embedding_dim=settings.embedding_dim,
        encoder=recurrent.LastStates(encoder) if settings.encoder_states == "last" else encoder,
        decoder=_build_decoder(settings, encoder.annotation_dim),
        pointer=_build_pointer(settings, encoder.annotation_dim) if settings.pointer else None,
        dropout=settings.dropout,
        max_source_length=settings.max_source_length,
    )


def _build_decoder(
    settings: sections.RecurrentSettings, annotation_dim: int
) -> recurrent.BahdanauDecoder | recurrent.LuongDecoder:
    decoder = settings.decoder
    score = _build_score(decoder.score, settings, annotation_dim)
    coverage = _build_coverage(decoder.coverage, score, settings.hidden_dim, annotation_dim)
    if isinstance(decoder, sections.BahdanauSettings):
        return recurrent.BahdanauDecoder(
            settings.embedding_dim,
            annotation_dim,
            settings.hidden_dim,
            score=score,
            cell=settings.cell,
            readout_dim=settings.embedding_dim,
            coverage=coverage,
            normalizer=_build_normalizer(settings),
        )
    return recurrent.LuongDecoder(
        settings.embedding_dim,
        annotation_dim,
        settings.hidden_dim,
        attend=SourceAttention(
            score,
            _build_window(decoder.window, settings.hidden_dim),
            coverage=coverage,
            normalizer=_build_normalizer(settings),
        ),
        readout=READOUTS[decoder.readout](annotation_dim, settings.hidden_dim),
        cell=settings.cell,
        layers=decoder.layers,
        input_feeding=decoder.input_feeding,
    )


def _build_coverage(
    coverage: sections.CoverageSettings, score: Score, query_dim: int, annotation_dim: int
) -> recurrent.SourceCoverage | None:
    if isinstance(coverage, sections.RecurrentCoverageSettings):
        return recurrent.RecurrentCoverage(score, query_dim, annotation_dim, coverage.dim)
    if isinstance(coverage, sections.FertilitySettings):
        return recurrent.Covered(score, recurrent.Fertility(annotation_dim, coverage.most))
    return None if coverage.kind == "none" else recurrent.Covered(score)


def _build_pointer(settings: sections.RecurrentSettings, annotation_dim: int) -> recurrent.PointerGenerator:
    return recurrent.PointerGenerator(annotation_dim, settings.hidden_dim, settings.embedding_dim)


def _build_window(
    window: sections.GlobalWindowSettings | sections.LocalWindowSettings, query_dim: int
) -> recurrent.GlobalWindow | recurrent.MonotonicWindow | recurrent.PredictiveWindow:
    if isinstance(window, sections.GlobalWindowSettings):
        return recurrent.GlobalWindow()
    if window.kind == "local-m":
        return recurrent.MonotonicWindow(window.radius)
    return recurrent.PredictiveWindow(query_dim, window.radius)


def _build_score(
    score: sections.PlainScoreSettings | sections.HiddenScoreSettings,
    settings: sections.RecurrentSettings,
    annotation_dim: int,
) -> Score:
    query_dim = settings.hidden_dim
    if isinstance(score, sections.HiddenScoreSettings):
        kind = {"additive": Additive, "concat": Concat}[score.kind]
        return kind(query_dim, annotation_dim, score.hidden_dim or settings.hidden_dim)
    if score.kind == "general":
        return General(query_dim, annotation_dim)
    if score.kind == "location":
        # The settings refuse a location score without a length; 1 only satisfies the type.
        return Location(query_dim, settings.max_source_length or 1)
    return Dot() if score.kind == "dot" else ScaledDot()
