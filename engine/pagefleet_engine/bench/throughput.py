"""Many requests at once, as an offline job sends them: tokens per second, as a share of what the machine could do."""

from __future__ import annotations

import argparse

from pagefleet_engine.bench.engine_options import add_engine_arguments, load_engine, model_folder
from pagefleet_engine.bench.percentiles import percentile
from pagefleet_engine.bench.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    parser.add_argument("--num-requests", type=int, default=256, help="Default: 256.")
    parser.add_argument("--input-len", default="1024", help="Tokens per prompt, or a range as 100:1024. Default: 1024.")
    parser.add_argument("--output-len", default="1024", help="Tokens per answer, or a range. Default: 1024.")
    parser.add_argument("--repeats", type=int, default=1, help="Runs after a short one to warm up. Default: 1.")
    parser.add_argument("--prompt-seed", type=int, default=0, help="Default: 0.")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark."""
    from pagefleet_engine.bench.offline import Subject, run_once  # noqa: PLC0415 torch
    from pagefleet_engine.bench.workloads import make_workload, parse_lengths  # noqa: PLC0415

    inputs = parse_lengths("input-len", arguments.input_len)
    outputs = parse_lengths("output-len", arguments.output_len)
    with model_folder(arguments) as (model, options):
        subject = Subject.of(model, options)
        llm = load_engine(model, {"enable_prefix_caching": False, **options})
        vocab_size = subject.arch.vocab_size
        workload = make_workload(arguments.num_requests, inputs, outputs, vocab_size, seed=arguments.prompt_seed)
        run_once(llm, workload, [min(8, n) for n in workload.output_lens])
        idle_before = llm.stats().gpu_idle_seconds
        times = [run_once(llm, workload) for _ in range(arguments.repeats)]
        idle = (llm.stats().gpu_idle_seconds - idle_before) / len(times)
        llm.shutdown()
    seconds = percentile(times, 50)
    input_lens = [len(prompt) for prompt in workload.prompts]
    floor = subject.cost.batch_seconds(subject.roofline, input_lens, workload.output_lens)
    figures = {
        "parameters": subject.parameters,
        "seconds": seconds,
        "output_tokens_per_s": workload.num_output_tokens / seconds,
        "total_tokens_per_s": (workload.num_output_tokens + workload.num_input_tokens) / seconds,
        "requests_per_s": arguments.num_requests / seconds,
        "floor_seconds": floor,
        "share_of_roofline": floor / seconds,
        "device_idle_seconds": idle,
    }
    settings = {name: getattr(arguments, name) for name in ("num_requests", "input_len", "output_len", "prompt_seed")}
    settings |= {**options, "model": arguments.shape or subject.arch.model_type}
    return Report(name="throughput", settings=settings, figures=figures, roofline=subject.roofline)
