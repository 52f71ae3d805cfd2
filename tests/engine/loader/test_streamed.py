"""Weights that are read where they lie: a store that cannot be reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagefleet_download.errors import StoreUnreachable
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader.streamed import streamed_files


def test_a_store_that_went_away_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*arguments: object) -> None:
        raise StoreUnreachable("s3://b: no answer (6 attempts)")

    monkeypatch.setattr("pagefleet_engine.loader.streamed.WeightStream", away)
    with pytest.raises(
        ModelLoadError, match=r"^s3://b: no answer \(6 attempts\): check the address, network and proxy"
    ):
        streamed_files(tmp_path).__enter__()
