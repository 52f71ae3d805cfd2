"""Runs in a pod: a Hugging Face hub with one repository on port 8000. Its branch `main` is the embedded model, whose
commit is printed, and `mixture` the same as a mixture of experts.
"""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors.torch import load, save

from e2e.kubernetes.relay import serve
from tests.fakes.hub_server import HubServer, Repository

EXPERTS = 4
WEIGHTS = "model.safetensors"
_MIXTRALS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def mixture(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return a mixture that answers as the model does: each of its experts is the model's feed-forward layer."""
    config = json.loads(files["config.json"])
    routed = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **routed}
    weights: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    for name, weight in load(files[WEIGHTS]).items():
        before, is_mlp, own = name.partition(".mlp.")
        if not is_mlp:
            weights[name] = weight
            continue
        block = f"{before}.block_sparse_moe"
        weights[f"{block}.gate.weight"] = torch.randn(EXPERTS, config["hidden_size"], dtype=weight.dtype)
        for expert in range(EXPERTS):
            weights[f"{block}.experts.{expert}.{_MIXTRALS[own.removesuffix('.weight')]}.weight"] = weight.clone()
    return {**files, "config.json": json.dumps(config).encode(), WEIGHTS: save(weights, {"format": "pt"})}


def main(name: str) -> None:
    spec = importlib.util.find_spec("pagefleet_engine")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "builtin" / "tiny"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with HubServer() as hub:
        repository = hub.repositories[name] = Repository()
        repository.commit(mixture(files), "mixture")
        print(repository.commit(files), flush=True)
        there = urlsplit(hub.url)
        asyncio.run(serve(str(there.hostname), int(there.port or 0)))


if __name__ == "__main__":
    main(sys.argv[1])
