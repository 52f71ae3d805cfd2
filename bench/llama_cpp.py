"""pagefleet against llama.cpp on one machine, of the same GGUF file: decode of one stream and of 16, prompts of 512.

Each engine runs in its own process, and each round measures one after the other. The model has the shape of a Llama of
1.2 billion weights, random ones, in Q4_K_M and Q8_0 as llama.cpp's own quantizer writes them. Each round also copies
memory: what decoding of one stream reads of the file for each token is told as a share of that.

    CMAKE_ARGS=-DGGML_NATIVE=ON PEER/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    python bench/llama_cpp.py --llama-python PEER/bin/python --json bench/results/llama_cpp.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engines.client import EngineProcess, EngineSpec
from bench.report import write_report

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16, 2048, 8192, 32, 8, 64, 8192
STREAMS, PROMPT, LONG_PROMPT, OUTPUT = 16, 32, 512, 64
COPIED = 256 << 20
ONE = "decode of 1, tokens/s"
_QUANTIZE = """
import ctypes, sys, llama_cpp
given = llama_cpp.llama_model_quantize_default_params()
given.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(given)))
"""
Figures = dict[str, dict[str, list[float]]]


def write_model(path: Path, kind: str = "F16", encode: Callable[[tuple[int, int]], np.ndarray] | None = None) -> None:
    """Write the shape with no tokenizer, and random weights in float16, or what `encode` makes of a shape in a kind."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer, rng = GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("none")

    def add(name: str, *shape: *tuple[int, int]) -> None:
        if encode is not None:
            numbers = encode(shape)
        else:
            numbers = (rng.standard_normal(shape, np.float32) * 0.02).astype(np.float16)
        writer.add_tensor(f"{name}.weight", numbers, raw_dtype=GGMLQuantizationType[kind])

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    add("token_embd", VOCAB, HIDDEN)
    add("output", VOCAB, HIDDEN)
    add_norm("output_norm")
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"{block}.{name}")
        for name in ("attn_q", "attn_output"):
            add(f"{block}.{name}", HIDDEN, HIDDEN)
        for name in ("attn_k", "attn_v"):
            add(f"{block}.{name}", KV_HEADS * HEAD_DIM, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            add(f"{block}.{name}", INNER, HIDDEN)
        add(f"{block}.ffn_down", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_in(form: str, folder: Path, python: str) -> Path:
    """Return the file in a form such as Q4_K_M, made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    plain, path = folder / "llama-1b-F16.gguf", folder / f"llama-1b-{form}.gguf"
    if path.exists():
        return path
    if not plain.exists():
        begun = plain.with_suffix(".part")
        write_model(begun)
        begun.rename(plain)
    begun = path.with_suffix(".part")
    subprocess.run([python, "-c", _QUANTIZE, plain, begun, form], check=True, capture_output=True)
    begun.rename(path)
    return path


def bytes_per_token(path: Path) -> int:
    """Of the file's weights: every matrix once, and of the embedding, next to nothing."""
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors if tensor.name != "token_embd.weight")


def copy_rate(threads: int, times: int = 8) -> float:
    """Bytes per second that a copy of memory reads and writes, by the median time."""
    torch.set_num_threads(threads)
    source = torch.ones(COPIED, dtype=torch.uint8)
    target, taken = torch.ones_like(source), []
    for _ in range(times):
        started = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - started)
    return 2 * COPIED / statistics.median(taken)


def measured(engine: EngineProcess, seed: str) -> Mapping[str, float]:
    """Tokens per second, each way; new prompts each time, so nothing is cached."""
    rng = random.Random(seed)

    def seconds(streams: int, length: int, output: int) -> float:
        prompts = [[rng.randrange(10, VOCAB) for _ in range(length)] for _ in range(streams)]
        return engine.generate(prompts, [output] * streams)[0]

    found = {}
    for streams in (1, STREAMS):
        first, whole = seconds(streams, PROMPT, 1), seconds(streams, PROMPT, 1 + OUTPUT)
        found[f"decode of {streams}, tokens/s"] = streams * OUTPUT / (whole - first)
    found[f"prompt of {LONG_PROMPT}, tokens/s"] = LONG_PROMPT / seconds(1, LONG_PROMPT, 1)
    return found


def run(engines: Sequence[EngineProcess], rounds: int, form: str, threads: int) -> Figures:
    """Warm up, then measure in turns, and beside them the machine's "copy"."""
    figures: Figures = {engine.spec.name: {} for engine in engines} | {"copy": {"GB/s": []}}
    for number in range(-1, rounds):
        for engine in engines if number % 2 else engines[::-1]:
            for name, value in measured(engine, f"{number}").items() if number >= 0 else ():
                figures[engine.spec.name].setdefault(name, []).append(value)
                print(f"{form} round {number + 1} {engine.spec.name}: {name} {value:.1f}", flush=True)
            if number < 0:
                measured(engine, "warm")
        if number >= 0:
            figures["copy"]["GB/s"].append(copy_rate(threads) / 1e9)
            print(f"{form} round {number + 1} copy: {figures['copy']['GB/s'][-1]:.1f} GB/s", flush=True)
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", required=True, help="Python of an environment with llama-cpp-python")
    parser.add_argument("--forms", nargs="+", default=["Q4_K_M", "Q8_0"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "pagefleet-bench-gguf")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    peer = {"streams": STREAMS, "context": 4096, "threads": arguments.threads}
    ours = {"device": "cpu", "dtype": "bfloat16", "num_threads": arguments.threads, "skip_tokenizer_init": True}
    report = {}
    for form in arguments.forms:
        model = model_in(form, arguments.models, arguments.llama_python)
        engines = [
            EngineProcess(spec, model, Path(tempfile.gettempdir()) / f"bench-{spec.name}.log")
            for spec in (
                EngineSpec("pagefleet", "pagefleet", sys.executable, ours | {"max_model_len": 1024}),
                EngineSpec("llama.cpp", "llama.cpp", arguments.llama_python, peer),
            )
        ]
        try:
            figures = run(engines, arguments.rounds, form, arguments.threads)
        finally:
            for engine in engines:
                engine.close()
        over = {
            name: statistics.median(a / b for a, b in zip(values, figures["llama.cpp"][name], strict=True))
            for name, values in figures["pagefleet"].items()
        }
        print(f"{form}, pagefleet / llama.cpp: " + ", ".join(f"{name} {value:.2f}x" for name, value in over.items()))
        read = bytes_per_token(model) / 1e9
        shares = {
            engine.spec.name: statistics.median(
                read * tokens / copied
                for tokens, copied in zip(figures[engine.spec.name][ONE], figures["copy"]["GB/s"], strict=True)
            )
            for engine in engines
        }
        print(f"{form}, share of copy in decode of 1: " + ", ".join(f"{n} {v:.2f}" for n, v in shares.items()))
        report[form] = {
            "read for a token, GB": read,
            "share of copy, decode of 1": shares,
            "rounds": figures,
            "load, s": {engine.spec.name: engine.load_seconds for engine in engines},
            "pagefleet over llama.cpp": over,
        }
    if arguments.json:
        write_report(arguments.json, "llama_cpp", report)


if __name__ == "__main__":
    main()
