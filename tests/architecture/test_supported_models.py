"""Which architectures are served is said twice, because the operator cannot import the engine. Both say the same."""

from __future__ import annotations

from pagefleet_engine.models.registry import MODEL_MODULES
from pagefleet_operator.download.config_facts import supported_architectures


def test_the_downloader_knows_the_engines_architectures() -> None:
    assert supported_architectures() == tuple(MODEL_MODULES)
