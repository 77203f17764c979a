"""From an experiment's settings to a model."""

from __future__ import annotations

from regard.errors import ConfigurationError
from regard.models import RecurrentTranslator, recurrent
from regard.models.recurrent.luong import READOUTS
from regard.models.recurrent.source import SourceAttention
from regard.scores import Additive, Concat, Dot, General, Location, ScaledDot, Score
from regard.translation import settings as told


def build_model(settings: told.ModelSettings, source_size: int, target_size: int) -> RecurrentTranslator:
    """The model that the settings describe, for vocabularies of these sizes, freshly initialised.

    Raises:
        ConfigurationError: sizes that cannot meet, such as a dot product of a state and an annotation of other width.
    """
    if settings.hidden_dim % 2:
        raise ConfigurationError(
            f"model.hidden_dim is {settings.hidden_dim}; it needs to be even: each direction of the encoder takes half"
        )
    encoder = recurrent.Encoder(
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
        encoder=encoder,
        decoder=_build_decoder(settings, encoder.annotation_dim),
        dropout=settings.dropout,
        max_source_length=settings.max_source_length,
    )


def _build_decoder(
    settings: told.ModelSettings, annotation_dim: int
) -> recurrent.BahdanauDecoder | recurrent.LuongDecoder:
    decoder = settings.decoder
    score = _build_score(decoder.score, settings, annotation_dim)
    if isinstance(decoder, told.BahdanauDecoder):
        return recurrent.BahdanauDecoder(
            settings.embedding_dim,
            annotation_dim,
            settings.hidden_dim,
            score=score,
            cell=settings.cell,
            readout_dim=settings.embedding_dim,
        )
    return recurrent.LuongDecoder(
        settings.embedding_dim,
        annotation_dim,
        settings.hidden_dim,
        attend=SourceAttention(score, _build_window(decoder.window, settings.hidden_dim)),
        readout=READOUTS[decoder.readout](annotation_dim, settings.hidden_dim),
        cell=settings.cell,
        layers=decoder.layers,
        input_feeding=decoder.input_feeding,
    )


def _build_window(
    window: told.GlobalWindow | told.LocalWindow, query_dim: int
) -> recurrent.GlobalWindow | recurrent.MonotonicWindow | recurrent.PredictiveWindow:
    if isinstance(window, told.GlobalWindow):
        return recurrent.GlobalWindow()
    if window.kind == "local-m":
        return recurrent.MonotonicWindow(window.radius)
    return recurrent.PredictiveWindow(query_dim, window.radius)


def _build_score(score: told.PlainScore | told.HiddenScore, settings: told.ModelSettings, annotation_dim: int) -> Score:
    query_dim = settings.hidden_dim
    if isinstance(score, told.HiddenScore):
        kind = {"additive": Additive, "concat": Concat}[score.kind]
        return kind(query_dim, annotation_dim, score.hidden_dim or settings.hidden_dim)
    if score.kind == "general":
        return General(query_dim, annotation_dim)
    if score.kind == "location":
        # The settings refuse a location score without a length; 1 only satisfies the type.
        return Location(query_dim, settings.max_source_length or 1)
    return Dot() if score.kind == "dot" else ScaledDot()
