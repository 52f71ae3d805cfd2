"""A batch that has the engine to itself: how soon the first tokens come, and how fast the rest."""

from __future__ import annotations

import argparse

from pagefleet_engine.bench.engine_options import add_engine_arguments, load_engine, model_folder
from pagefleet_engine.bench.percentiles import percentile
from pagefleet_engine.bench.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    parser.add_argument("--batch-size", type=int, default=1, help="Requests at once. Default: 1.")
    parser.add_argument("--input-len", type=int, default=500, help="Tokens per prompt. Default: 500.")
    parser.add_argument("--output-len", type=int, default=128, help="Tokens per answer, at least 2. Default: 128.")
    parser.add_argument("--repeats", type=int, default=5, help="Runs after one to warm up. Default: 5.")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark."""
    from pagefleet_engine.bench.offline import Subject, run_once  # noqa: PLC0415 torch
    from pagefleet_engine.bench.workloads import Lengths, make_workload  # noqa: PLC0415

    batch_size, num_input, num_output = arguments.batch_size, arguments.input_len, max(2, arguments.output_len)
    with model_folder(arguments) as (model, options):
        subject = Subject.of(model, options)
        llm = load_engine(model, {"enable_prefix_caching": False, **options})
        first_s, per_token_s = [], []
        for repeat in range(arguments.repeats + 1):
            lengths = Lengths(num_input, num_input), Lengths(num_output, num_output)
            workload = make_workload(batch_size, *lengths, subject.arch.vocab_size, seed=repeat)
            first = run_once(llm, workload, [1] * batch_size)
            whole = run_once(llm, workload)
            if repeat > 0:
                first_s.append(first)
                per_token_s.append((whole - first) / (num_output - 1))
        llm.shutdown()
    floor = subject.cost.decode_seconds(subject.roofline, batch_size, num_input + num_output / 2)
    prefill_floor = subject.cost.prefill_seconds(subject.roofline, num_input) * batch_size
    median = percentile(per_token_s, 50)
    figures = {
        "parameters": subject.parameters,
        "first_token_ms": {"p50": percentile(first_s, 50) * 1e3, "p90": percentile(first_s, 90) * 1e3},
        "per_token_ms": {"p50": median * 1e3, "p90": percentile(per_token_s, 90) * 1e3},
        "output_tokens_per_s": batch_size / median,
        "decode_floor_ms": floor * 1e3,
        "decode_share_of_roofline": floor / median,
        "prefill_share_of_roofline": prefill_floor / percentile(first_s, 50),
    }
    settings = {"batch_size": batch_size, "input_len": num_input, "output_len": num_output, **options}
    settings["model"] = arguments.shape or subject.arch.model_type
    return Report(name="latency", settings=settings, figures=figures, roofline=subject.roofline)
