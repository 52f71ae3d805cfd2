"""The kinds of models whose configurations are read are those that the engine builds."""

from __future__ import annotations

from pagefleet_engine.models.model import MODEL_MODULES
from pagefleet_protocol.model_config.shape import MODEL_TYPES


def test_what_protocol_reads_is_what_the_engine_builds() -> None:
    assert tuple(MODEL_MODULES) == MODEL_TYPES
