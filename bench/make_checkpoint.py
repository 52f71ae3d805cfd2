"""Writes a checkpoint of a named shape with random weights in bfloat16, in shards, as real ones are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from pagefleet_engine.bench.shapes import named_shapes, write_shape
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.weight_map import weight_map
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.models.model import build_model
from safetensors.torch import save_file

_SHARD_BYTES = 4 * 2**30


def write_checkpoint(shape: str, folder: Path, device: torch.device) -> None:
    """Norms are 1, everything else is from N(0, 0.02); random numbers are made on `device`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shape(shape, folder)
    model = build_model(read_arch(folder), Placement(torch.bfloat16, torch.device("cpu"), use_kernels=False))
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    num_shards = 0
    destinations = weight_map(model.weights())
    for index, (name, destination) in enumerate(destinations.items()):
        values = torch.empty(destination.shape, dtype=torch.bfloat16, device=device)
        shard[name] = (values.fill_(1.0) if name.endswith("norm.weight") else values.normal_(0.0, 0.02)).cpu()
        full = sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES
        if full or index + 1 == len(destinations):
            num_shards += 1
            file = f"model-{num_shards:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=named_shapes())
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="Where random numbers are made. Default: cpu.")
    arguments = parser.parse_args()
    write_checkpoint(arguments.shape, arguments.folder, torch.device(arguments.device))


if __name__ == "__main__":
    main()
