"""An embedding in GGUF's blocks: rows are those of the numbers it stands for, also in a step that was recorded."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.gguf.blocks import BLOCK_TYPES, BY_NAME
from pagefleet_engine.layers.embedding import Embedding
from pagefleet_engine.layers.quantization_scheme import BlockScheme, Quantization, Rule
from pagefleet_engine.layers.weight import Placement
from pagefleet_kernels.native.recording import Recording, RecordingMemory
from torch import Tensor

from tests.fakes.gguf_blocks import random_blocks
from tests.fakes.gguf_files import Type
from tests.fakes.native_kernels import native_libraries

LIBRARIES = native_libraries()
NUM_ROWS, WIDTH = 20, 512

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="the kernels of the CPU were not compiled")


def embedding_of(name: str, dtype: torch.dtype, scale: float = 1.0) -> tuple[Embedding, Tensor]:
    """One that is filled, and the rows it is to give."""
    stored = torch.from_numpy(random_blocks(getattr(Type, name), NUM_ROWS, WIDTH, seed=1))
    quantization = Quantization(rules=(Rule(("model.embed_tokens",), BlockScheme((name,))),))
    place = Placement(dtype, torch.device("cpu"), use_kernels=False, quantization=quantization, native=LIBRARIES[0])
    embedding = Embedding(NUM_ROWS, WIDTH, place.within("model.embed_tokens"), scale)
    (slot,) = (slot for _, slot in embedding.weights())
    assert slot.nbytes == stored.nbytes
    slot.fill(0, stored)
    return embedding, BY_NAME[name].decode(stored.view(-1, BY_NAME[name].num_bytes)).view(NUM_ROWS, WIDTH).to(dtype)


@pytest.mark.parametrize("name", [kind.name for kind in BLOCK_TYPES.values() if kind.bits])
@torch.inference_mode()
def test_rows_are_those_of_the_numbers(name: str) -> None:
    embedding, rows_VD = embedding_of(name, torch.bfloat16)
    ids_T = torch.tensor([3, 0, NUM_ROWS - 1, 3])
    recording = Recording(LIBRARIES[0], RecordingMemory(1 << 22), lambda: embedding(ids_T))
    assert torch.equal(recording.result, rows_VD[ids_T])
    ids_T.copy_(torch.tensor([1, 2, 3, 4]))
    assert torch.equal(recording.run(), rows_VD[ids_T])
    assert torch.equal(embedding(torch.arange(NUM_ROWS)), rows_VD)
    assert embedding(torch.arange(0)).shape == (0, WIDTH)


@torch.inference_mode()
def test_rows_of_float32_are_scaled() -> None:
    embedding, rows_VD = embedding_of("Q4_K", torch.float32, scale=2.5)
    assert torch.equal(embedding(torch.arange(NUM_ROWS)), rows_VD * 2.5)
