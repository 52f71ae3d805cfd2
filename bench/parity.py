"""The engine against transformers in float32: greedy tokens in every mode, and log-probabilities of whole prompts.

python bench/parity.py --json bench/results/parity.json
python bench/parity.py --json bench/results/parity.json --families glm4 olmo3   # these; rows of the others stay
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagefleet_engine import LLM, SamplingParams

from bench.report import write_report
from tests.fakes.checkpoints import FAMILIES, reference_model, save_checkpoint
from tests.fakes.greedy_parity import MODES, Mode, engine_tokens, prompts_of, reference_tokens

NUM_PROMPTS, LONGEST, NUM_TOKENS = 32, 300, 64


def largest_logprob_difference(folder: Path, prompts: list[list[int]]) -> float:
    """Over all positions and the 20 likeliest tokens of each prompt."""
    model, largest = reference_model(folder), 0.0
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)
    with LLM(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=512, num_threads=1) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for position, candidates in enumerate((result.prompt_logprobs or [])[1:]):
            for token_id, entry in (candidates or {}).items():
                largest = max(largest, abs(entry.logprob - logprobs[position, token_id].item()))
    return largest


def earlier_rows(path: Path) -> dict[str, dict[str, Any]]:
    """What the file has of all families, each with the commit that it was measured at."""
    if not path.exists():
        return {}
    report = json.loads(path.read_text())
    return {name: {"commit": report["commit"]} | rows for name, rows in report["figures"]["architectures"].items()}


def main() -> None:
    """Compare, print, write; exit status 1 on any difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, metavar="FAMILY", help="all unless given")
    arguments = parser.parse_args()
    prompts = prompts_of(NUM_PROMPTS, LONGEST)
    figures: dict[str, dict[str, object]] = {}
    for name in arguments.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(Path(folder), name, "float32", "1GB", {})
            expected = reference_tokens(Path(folder), prompts, NUM_TOKENS)
            rows: dict[str, object] = {"largest logprob difference": largest_logprob_difference(Path(folder), prompts)}
            for mode in (*MODES, Mode("two tensor ranks", settings={"tensor_parallel_size": 2})):
                tokens, _ = engine_tokens(Path(folder), prompts, NUM_TOKENS, mode)
                same = sum(a == b for a, b in zip(tokens, expected, strict=True))
                rows[mode.name] = f"{same} of {len(prompts)} equal"
        figures[name] = rows
        print(name, rows, flush=True)
        if arguments.json:  # what is measured stays, if the run does not end
            earlier = earlier_rows(arguments.json) if arguments.families else {}
            rows_by_name = dict(sorted((earlier | figures).items()))
            everything = {"prompts": NUM_PROMPTS, "tokens": NUM_TOKENS, "architectures": rows_by_name}
            write_report(arguments.json, "parity", everything)
    whole = f"{NUM_PROMPTS} of {NUM_PROMPTS} equal"
    if any(rows[mode.name] != whole for rows in figures.values() for mode in MODES):
        sys.exit(1)


if __name__ == "__main__":
    main()
