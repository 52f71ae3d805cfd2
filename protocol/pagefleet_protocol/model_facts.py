"""What a download tells about a model and about itself: plans are made from the facts, people read the progress."""

from __future__ import annotations

from typing import Literal

import msgspec

from pagefleet_protocol.model_config.kv_spec import KVSpec

FORMAT_VERSION = 1
MAX_RESULT_BYTES = 4096
"""Kubernetes keeps so much of a container's termination message."""

Reason = Literal[
    "",
    "ModelNotFound",
    "AccessDenied",
    "StoreUnreachable",
    "ChecksumMismatch",
    "DiskFull",
    "BadModel",
    "BadSettings",
]
"""Why a download ended; empty: it succeeded."""

Phase = Literal["listing", "downloading", "verifying", "done"]

FINAL_REASONS: frozenset[Reason] = frozenset({"ModelNotFound", "AccessDenied", "BadModel", "BadSettings"})
"""A retry will not mend these: somebody has to change something first."""


class StageFacts(msgspec.Struct, frozen=True):
    """Of a model whose stages of a pipeline need memory unevenly: bytes of its tensors as they are stored, by place.

    Of what it does not use, as an encoder of images, nothing is counted.
    """

    first: int
    """Before the layers."""
    last: int
    """Behind them."""
    both: int
    """Before and behind them: a table that is embedding and head."""
    layers: tuple[int, ...]
    """Of each."""
    windows: tuple[int, ...]
    """Of each layer, in tokens; 0: it sees everything."""


class ModelFacts(msgspec.Struct, frozen=True):
    """What planning needs to know of a model. Counts are of layers, heads, tokens and bytes.

    They stay on disks beside models: what a newer program adds is ignored.
    """

    revision: str
    """Commit of a repository, digest of a store's tags; empty where there is neither."""
    weights_bytes: int
    """All tensors of the checkpoint, as they are stored."""
    num_files: int
    """Files that are downloaded."""
    architecture: str
    """`model_type` of the configuration."""
    dtype: str
    """Of the checkpoint, as the configuration names it."""
    quantization: str
    """fp8, mxfp4, gguf or int8, int4, int3, int2 where matrices are stored so, else empty."""
    num_layers: int
    num_window_layers: int
    """Layers that keep something of the last `window` tokens only."""
    window: int
    """In tokens; 0 where no layer has one."""
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    """Numbers in what is kept of a token, for each of `num_kv_heads` and each of `kv_vectors`."""
    max_position_embeddings: int
    """Longest sequence the model was made for, rope scaling included."""
    default_length: int = 0
    """Longest sequence that is served unless asked otherwise, where more would cost quality; 0: the one above."""
    kv_vectors: int = 2
    """A key and a value, or 1: a latent that both are made from."""
    num_kv_shared_layers: int = 0
    """Layers that keep nothing of a token: they read what others keep."""
    num_experts: int | None = None
    """That tokens choose from in a layer; 0: none. None: an older program looked, which did not ask."""
    experts_per_token: int = 0
    """That one token chooses; 0 also where an older program looked."""
    expert_bytes: int = 0
    """Of their tensors, within `weights_bytes`."""
    cpu_bytes: int = 0
    """What the weights take on a CPU, where neither that is stored nor another type of float; else 0."""
    gpu_bytes: int = 0
    """The same on a GPU."""
    stages: StageFacts | None = None
    """None: stages with as many layers need as much, or an older program looked."""

    @property
    def kv(self) -> KVSpec:
        """What each layer keeps of a token."""
        return KVSpec(self.kv_vectors, self.num_kv_heads, self.head_dim)


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a download is."""

    phase: Phase = "listing"
    bytes_done: int = 0
    bytes_total: int = 0
    files_done: int = 0
    files_total: int = 0


class DownloadResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a download ended."""

    facts: ModelFacts | None = None
    reason: Reason = ""
    message: str = ""
    """What is wrong and what to do about it."""
    format: int = FORMAT_VERSION

    @property
    def exit_code(self) -> int:
        """0 success, 2 what a retry will not mend, 1 what it may."""
        if not self.reason:
            return 0
        return 2 if self.reason in FINAL_REASONS else 1


class DownloadResultError(ValueError):
    """The bytes are not a download's result; the message says what is wrong."""


def encode_result(result: DownloadResult) -> bytes:
    """One line of JSON of at most `MAX_RESULT_BYTES` with its line end; a longer message loses its end."""
    line = msgspec.json.encode(result)
    message = result.message
    while len(line) >= MAX_RESULT_BYTES:
        # A character takes up to six bytes (\u0000): this comes off until the rest fits, and never too much.
        message = message[: -max(1, (len(line) - MAX_RESULT_BYTES) // 6)]
        line = msgspec.json.encode(msgspec.structs.replace(result, message=message + "..."))
    return line + b"\n"


def decode_result(data: bytes | str) -> DownloadResult:
    """Parse a result: the last line that is not empty, whatever was written before it.

    Raises:
        DownloadResultError: it is no result, or one of another format.
    """
    text = data if isinstance(data, bytes) else data.encode(errors="replace")
    lines = text.strip().splitlines() or [b""]
    try:
        result = msgspec.json.decode(lines[-1], type=DownloadResult)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DownloadResultError(f"result of a download: {error}") from error
    if result.format != FORMAT_VERSION:
        raise DownloadResultError(f"result of a download: format {result.format}, this program reads {FORMAT_VERSION}")
    return result
