"""Prompts that begin alike: the first of them computes the common part, the others find it in the cache."""

from __future__ import annotations

import argparse

from pagefleet_engine.bench.engine_options import add_engine_arguments, load_engine, model_folder
from pagefleet_engine.bench.percentiles import summary
from pagefleet_engine.bench.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Benchmark."""
    parser.add_argument("--prefix-len", type=int, default=1024, help="Tokens that all prompts share. Default: 1024.")
    parser.add_argument("--input-len", type=int, default=64, help="Tokens of a prompt's own. Default: 64.")
    parser.add_argument("--num-requests", type=int, default=16, help="One after the other. Default: 16.")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> Report:
    """See Benchmark."""
    from pagefleet_engine.bench.offline import Subject, run_once  # noqa: PLC0415 torch
    from pagefleet_engine.bench.workloads import Lengths, Workload, make_workload  # noqa: PLC0415

    own, one = Lengths(arguments.input_len, arguments.input_len), Lengths(1, 1)
    with model_folder(arguments) as (model, options):
        subject = Subject.of(model, options)
        vocab_size, count = subject.arch.vocab_size, arguments.num_requests
        llm = load_engine(model, options)
        apart = make_workload(
            count + 1, Lengths(own.low + arguments.prefix_len, own.low + arguments.prefix_len), one, vocab_size, seed=1
        )
        alike = make_workload(count + 1, own, one, vocab_size, shared_prefix=arguments.prefix_len, seed=2)

        def first_token_ms(workload: Workload) -> list[float]:
            """Of each request after the first, which warms up or fills the cache."""
            singles = [Workload([prompt], [1]) for prompt in workload.prompts]
            return [run_once(llm, single) * 1e3 for single in singles][1:]

        uncached_ms = first_token_ms(apart)
        before = llm.stats()
        cached_ms = first_token_ms(alike)
        after = llm.stats()
        llm.shutdown()
    queries = after.prefix_cache_queries_tokens - before.prefix_cache_queries_tokens
    hits = after.prefix_cache_hits_tokens - before.prefix_cache_hits_tokens
    figures = {
        "uncached_first_token_ms": summary(uncached_ms),
        "cached_first_token_ms": summary(cached_ms),
        "uncached_over_cached": summary(uncached_ms)["p50"] / summary(cached_ms)["p50"],
        "hit_rate": hits / queries if queries else 0.0,
    }
    settings = {name: getattr(arguments, name) for name in ("prefix_len", "input_len", "num_requests")}
    settings |= {**options, "model": arguments.shape or subject.arch.model_type}
    return Report(name="prefix", settings=settings, figures=figures, roofline=subject.roofline)
