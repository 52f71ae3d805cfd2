"""llm-compressor's recipes over tokens that it is given, in a process of its own Python: `quantize_there` asks for one
checkpoint, the rest makes it there."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def quantize_there(python: str, model: Path, scheme: str, algorithm: str, tokens: Sequence[list[int]], to: Path) -> str:
    """Write a checkpoint; returns what went wrong, in a line, or nothing."""
    job = {"model": str(model), "scheme": scheme, "algorithm": algorithm, "tokens": list(tokens), "to": str(to)}
    done = subprocess.run([python, __file__], input=json.dumps(job), capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2][:160]


def answer(job: dict[str, Any]) -> None:
    """Quantize as the job says."""
    names = {
        "rtn": ("quantization", "QuantizationModifier"),
        "gptq": ("gptq", "GPTQModifier"),
        "awq": ("transform.awq", "AWQModifier"),
    }

    def modifier(algorithm: str, **settings: Any) -> Any:
        module, name = names[algorithm]
        return getattr(importlib.import_module(f"llmcompressor.modifiers.{module}"), name)(**settings)

    how = {"targets": "Linear", "scheme": job["scheme"], "ignore": ["lm_head"]}
    recipe = (
        [modifier("awq"), modifier("rtn", **how)] if job["algorithm"] == "awq" else [modifier(job["algorithm"], **how)]
    )
    transformers, datasets = importlib.import_module("transformers"), importlib.import_module("datasets")
    tokens: list[list[int]] = job["tokens"]
    rows = {"input_ids": tokens, "attention_mask": [[1] * len(sequence) for sequence in tokens]}
    importlib.import_module("llmcompressor").oneshot(
        model=transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="bfloat16"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(job["model"]),
        dataset=datasets.Dataset.from_dict(rows),
        recipe=recipe,
        max_seq_length=max(map(len, tokens)),
        num_calibration_samples=len(tokens),
        output_dir=job["to"],
    )


if __name__ == "__main__":
    answer(json.load(sys.stdin))
