"""Perplexity of the embedded model in few bits: as `pagefleet quantize` writes it, and as llm-compressor does.

    python bench/perplexity.py --llm-compressor-python PEER/bin/python --json bench/results/perplexity.json

Both calibrate with the same tokens of conversations that the model knows, and every checkpoint is tried by the same
code of this engine, in float32: on texts that the model knows by heart, and on conversations that were kept apart, of
whose questions it knows nothing. Seconds are of a whole run, llm-compressor's with its process.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.compression.calibration import Text, read_text
from pagefleet_engine.compression.quantize import quantize
from pagefleet_engine.compression.recipe import Recipe
from pagefleet_engine.compression.settings import Algorithm, Scheme
from pagefleet_engine.compression.stages import Stages, in_batches, negative_log_likelihood
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.text.model_files import load_text_model

from bench.engines.llm_compressor import quantize_there
from bench.report import write_report
from tiny.dataset import load_knowledge

MODEL = builtin_model_path("tiny")
GROUP_SIZE = 128
RUNS: list[tuple[Scheme, Algorithm, str]] = [
    ("fp8", "rtn", "FP8_DYNAMIC"),
    ("fp8-block", "rtn", ""),
    ("int8", "rtn", "W8A8"),
    ("int8", "gptq", "W8A8"),
    ("w8a16", "gptq", "W8A16"),
    ("w4a16", "rtn", "W4A16"),
    ("w4a16", "gptq", "W4A16"),
    ("w4a16", "awq", "W4A16"),
    ("w4a16-asym", "rtn", "W4A16_ASYM"),
    ("w4a16-asym", "gptq", "W4A16_ASYM"),
    ("w4a16-asym", "awq", "W4A16_ASYM"),
]
"""Scheme and algorithm, and llm-compressor's name for the scheme where it is asked, too."""


def texts(folder: Path) -> tuple[Text, tuple[list[int], ...]]:
    """Conversations, and texts that the model knows."""
    knowledge, model = load_knowledge(), load_text_model(MODEL, MODEL)
    turns = [[*one.messages, {"role": "assistant", "content": one.answer}] for one in knowledge.exchanges()]
    file = folder / "conversations.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns), encoding="utf-8")
    return read_text(file, model, 256, 256), tuple(map(model.completion_tokens, knowledge.texts))


@torch.inference_mode()
def perplexity(folder: Path, sequences: tuple[list[int], ...]) -> float:
    """Of a checkpoint, over all tokens but each sequence's first."""
    arch, batches = read_arch(folder), in_batches(sequences)
    stages = Stages(folder, arch, torch.float32)
    model = load_model(folder, arch, stages.placement(None), "auto", 0)
    hidden = stages.run(model, [batch.token_ids_T for batch in batches], batches)
    return math.exp(negative_log_likelihood(model, hidden, batches))


def main() -> None:
    """Quantize by each recipe, and try what comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm-compressor-python", metavar="PYTHON")
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        text, known = texts(Path(scratch))

        def tried(folder: Path, seconds: float) -> dict[str, float]:
            found = {
                "perplexity, known texts": perplexity(folder, known),
                "perplexity, held-out conversations": perplexity(folder, text.held_out),
                "seconds": seconds,
            }
            print(folder.name, found, flush=True)
            return found

        figures: dict[str, Any] = {
            "calibration tokens": sum(map(len, text.calibration)),
            "known tokens": sum(map(len, known)),
            "held-out tokens": sum(map(len, text.held_out)),
            "bfloat16": tried(MODEL, 0.0),
        }
        for scheme, algorithm, theirs in RUNS:
            name, ours = f"{scheme} {algorithm}", Path(scratch) / f"{scheme}-{algorithm}"
            recipe = Recipe(
                scheme=scheme,
                algorithm=algorithm,
                group_size=GROUP_SIZE if scheme.startswith("w") else None,
                actorder="weight" if algorithm == "gptq" else "none",
            )
            started = time.perf_counter()
            quantize(MODEL, recipe, text, ours, lambda line: None, "float32")
            figures[name] = {"pagefleet": tried(ours, time.perf_counter() - started)}
            if arguments.llm_compressor_python and theirs:
                python, peer = arguments.llm_compressor_python, Path(scratch) / f"llm-compressor-{scheme}-{algorithm}"
                started = time.perf_counter()
                wrong = quantize_there(python, MODEL, theirs, algorithm, text.calibration, peer)
                seconds = time.perf_counter() - started
                figures[name]["llm-compressor"] = {"failed": wrong} if wrong else tried(peer, seconds)
            if arguments.json:  # what there is of it: a recipe of the other may take half an hour
                write_report(arguments.json, "perplexity", figures)


if __name__ == "__main__":
    main()
