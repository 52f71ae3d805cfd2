"""What every plan needs beside an InferenceService: the administrator's settings, and the facts of a model. No test."""

from __future__ import annotations

from pagefleet_operator.render.settings import ClusterSettings
from pagefleet_protocol.model_facts import ModelFacts

UID = "00000000-0000-4000-8000-000000000001"
COMMIT = "c0ffee" + "0" * 34
SETTINGS = ClusterSettings(
    engine_image="pagefleet-engine:1",
    router_image="pagefleet-router:1",
    operator_image="pagefleet-operator:1",
    operator_namespace="pagefleet",
)
FACTS = ModelFacts(
    revision=COMMIT,
    weights_bytes=16 << 30,
    num_files=9,
    architecture="llama",
    dtype="bfloat16",
    quantization="",
    num_layers=32,
    num_window_layers=0,
    window=0,
    num_attention_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
)
