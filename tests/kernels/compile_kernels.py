"""Compile the kernels for GPUs that need not be here, from the launches of real calls; prints one JSON line for each.

Run by test_compile.py in a process of its own, because Triton decides at its import whether it compiles or interprets:
compile_kernels.py CAPABILITY [--first] SET..., where a set is `attention:HEAD_DIM:DTYPE`, `groups:HEAD_DIM:GROUP...`
(all without a group), `latents`, `products`, `experts` or `others`. With `--first` a kernel is compiled as often as
meets each set of its tensors' types on each kind of tile, low or tall, and each way of each of its switches, once.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from pagefleet_kernels import (
    activation,
    attention,
    attention_launch,
    cascade_attention,
    coded_experts,
    coded_matmul,
    decode_attention,
    early_launch,
    expert_blocks,
    experts,
    few_rows_matmul,
    fp8,
    heads,
    kv_cache,
    latent_attention,
    latents,
    mxfp4_experts,
    nonfinite,
    norm,
    packed_experts,
    packed_matmul,
    quantize,
    rank_sum,
    rounded_attention,
    sampling,
    sampling_edits,
    sampling_truncation,
    scaled_matmul,
    score_rule,
    step_inputs,
    token_mask,
    tuning,
)
from pagefleet_kernels.layout import KVLayout
from pagefleet_kernels.sampling_record import TokenRecord
from pagefleet_kernels.sampling_rows import RowParameters, SamplingRows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MODULES = (
    activation,
    attention,
    attention_launch,
    cascade_attention,
    coded_experts,
    coded_matmul,
    decode_attention,
    early_launch,
    expert_blocks,
    experts,
    few_rows_matmul,
    fp8,
    heads,
    kv_cache,
    latent_attention,
    latents,
    mxfp4_experts,
    nonfinite,
    norm,
    packed_experts,
    packed_matmul,
    quantize,
    rank_sum,
    rounded_attention,
    sampling,
    sampling_edits,
    sampling_truncation,
    scaled_matmul,
    step_inputs,
    token_mask,
    tuning,
)
SPECS = (
    quantize.QuantizeSpec(fp8.FP8),
    quantize.QuantizeSpec(fp8.FP8, torch.ones(1)),
    quantize.QuantizeSpec(fp8.FP8, group=128),
    quantize.QuantizeSpec(torch.int8),
    quantize.QuantizeSpec(torch.int8, torch.ones(1)),
)
FORM = ("HEAD_DIM", "GROUP", "BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLITS", "ROWS", "WINDOW", "FP8")
OPERANDS = ("q_ptr", "x_ptr", "weight_ptr")
NUMBERED = ("FP8", "BITS", "SCALE_BITS")
"""Switches whose every number is another way; of sizes it matters whether there is one."""
TALL = 64
"""Rows of a tile that Hopper's wide instructions multiply."""
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


class CompileOnly:
    """Stands in for a kernel: a launch compiles it as Triton would for these arguments, and runs nothing.

    Args:
        kernel: that it stands for.
        capability: of the GPU, e.g. 90.
        seen: traits of what was compiled of all kernels: launches that add none are left out; None: none is left out.
    """

    def __init__(self, kernel: Any, capability: int, seen: set[Hashable] | None) -> None:
        self._kernel = kernel
        self._target = GPUTarget("cuda", capability, 32)
        self._seen = seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        names = self._kernel.arg_names
        values = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        operands = {type_name(values[name]) for name in OPERANDS if name in values}
        constants = {name for name in names if self._kernel.params[names.index(name)].is_constexpr}
        if self._seen is not None:
            found = {(self._kernel.__name__, *trait) for trait in traits(values, constants)}
            if found <= self._seen:
                return
            self._seen |= found
        source = ASTSource(
            fn=self._kernel,
            signature={name: "constexpr" if name in constants else type_name(values[name]) for name in names},
            constexprs={(names.index(name),): values[name] for name in constants},
            attrs={
                (index,): [["tt.divisibility", 16]]
                for index, name in enumerate(names)
                if name not in constants and is_aligned(values[name])
            },
        )
        options = {name: value for name, value in kwargs.items() if name not in values}
        compiled = triton.compile(source, target=self._target, options=options)
        report = {
            "kernel": self._kernel.__name__,
            "capability": self._target.arch,
            "form": {name: values[name] for name in FORM if name in values},
            "operands": sorted(operands),
            "shared_bytes": compiled.metadata.shared,
            "tensor_cores": "wgmma"
            if "wgmma" in compiled.asm["ptx"]
            else "mma"
            if "mma" in compiled.asm["ptx"]
            else "",
            **resources(compiled),
        }
        print(json.dumps(report), flush=True)


def traits(values: dict[str, Any], constants: set[str]) -> set[tuple[Hashable, ...]]:
    """What tells a launch's code from others of its kernel: its tensors' types on its kind of tile, and each switch."""
    types = tuple(type_name(value) for value in values.values() if isinstance(value, torch.Tensor))
    sizes = {name for name in constants - set(NUMBERED) if isinstance(values[name], int)}
    switches = {(name, bool(values[name]) if name in sizes else values[name]) for name in constants}
    return {(types, values.get("BLOCK_M", 0) >= TALL), *switches}


def resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills; only the assembler tells those from other uses of the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    spilled = spilled_bytes(compiled) if found["STACK"] + found["LOCAL"] else 0
    return {"registers": found["REG"], "spilled_bytes": spilled}


def spilled_bytes(compiled: Any) -> int:
    """Assemble once more, and read what is said of spills."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        arch = compiled.metadata.target.arch
        name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        command = [str(TOOLS / "ptxas"), "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def attention_inputs(
    head_dim: int, dtype: torch.dtype, stored: torch.dtype, group: int = 4
) -> tuple[torch.Tensor, ...]:
    """Queries, pages, tables, query starts and lengths of 8 sequences."""
    layout = KVLayout(num_blocks=4, num_layers=2, num_kv_heads=2, block_size=16, head_dim=head_dim)
    cache = layout.layer_view(torch.zeros(layout.shape, dtype=stored), 0)
    index = torch.zeros(9, dtype=torch.int64 if dtype == torch.float16 else torch.int32)
    tables = torch.zeros(8, 64, dtype=torch.int32)
    return torch.zeros(8, 2 * group, head_dim, dtype=dtype), cache, tables, index, index[:8]


def compile_attention(inputs: tuple[torch.Tensor, ...], sliding_window: int | None) -> None:
    """Plain attention of long and of short queries."""
    q, cache, tables, index, lens = inputs
    rule = score_rule.ScoreRule(scale=1.0, window=sliding_window)
    attention.varlen_attention(q, cache, tables, index, lens, rule, 4096, backend="triton")
    for spec in SPECS:
        rounded_attention.rounded_attention(q, cache, tables, index, lens, rule, 1, spec, backend="triton")
    for num_splits in (1, 8):
        decode_attention.decode_attention(q, cache, tables, lens, rule, num_splits=num_splits, backend="triton")


def compile_groups(head_dim: int, groups: Sequence[int]) -> None:
    """Heads of one size, over groups, with keys and values in 16 and in 8 bits, and a shared prefix."""
    for stored in (torch.bfloat16, fp8.FP8):
        for group in groups:
            inputs = attention_inputs(head_dim, torch.bfloat16, stored, group)
            compile_attention(inputs, None)
            q, cache, tables, index, lens = inputs
            rule = score_rule.ScoreRule(scale=1.0)
            cascade_attention.cascade_attention(q, cache, tables, index, lens, rule, 4096, 32, backend="triton")


def compile_attention_features(head_dim: int, dtype: torch.dtype) -> None:
    """What changes scores, as models combine it, over an fp8 pool, and a shared prefix."""
    q, cache, tables, index, lens = attention_inputs(head_dim, dtype, fp8.FP8)
    per_head = torch.zeros(8)
    scales: dict[str, Any] = {"scale": 1.0, "k_scale": 0.5, "v_scale": 0.5}
    features: tuple[dict[str, Any], ...] = (
        {"window": 512, "softcap": 50.0},
        {"window": 512, "sinks_N": per_head},
        {"chunk": 512},
        {"alibi_slopes_N": per_head},
    )
    for each in features:
        rule = score_rule.ScoreRule(**each, **scales)
        attention.varlen_attention(q, cache, tables, index, lens, rule, 4096, backend="triton")
    rule = score_rule.ScoreRule(softcap=50.0, sinks_N=per_head, **scales)
    cascade_attention.cascade_attention(q, cache, tables, index, lens, rule, 4096, 32, backend="triton")


def compile_elementwise(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(4, 2048, dtype=dtype), torch.zeros(2048, dtype=dtype)
    for quantized in (None, *SPECS):
        norm.rms_norm(x, weight, 1e-6, quantize=quantized, backend="triton")
        norm.layer_norm(x, weight, weight, 1e-5, quantize=quantized, backend="triton")
        activation.gated_activation(x, "gelu_tanh", quantize=quantized, backend="triton")
        activation.activation(x, "gelu", quantize=quantized, backend="triton")
    norm.rms_norm(x, weight, 1e-6, residual_TD=x, unit_offset=True, backend="triton")
    norm.layer_norm(x, weight, None, 1e-5, residual_TD=x, backend="triton")
    norm.layer_norm(x.view(4, 16, 128), weight.view(16, 128), None, 1e-5, backend="triton")
    activation.gated_activation(x, "silu", backend="triton")
    activation.activation(x, "relu", backend="triton")
    q, k, slots = x.view(4, 16, 128), x.view(4, 16, 128)[:, :4], torch.zeros(4, dtype=torch.int64)
    layout = KVLayout(num_blocks=4, num_layers=2, num_kv_heads=4, block_size=16, head_dim=128)
    for cache_dtype in (dtype, fp8.FP8, fp8.E5M2):
        cache = layout.layer_view(torch.zeros(layout.shape, dtype=cache_dtype), 0)
        kv_cache.write_kv(k, k, cache, slots, backend="triton")
        for rotary_dim, norm_H in ((128, weight[:128]), (96, None)):
            table = torch.zeros(64, rotary_dim)
            heads.prepare_heads(q, 8, 4, table, slots, cache, slots, q_norm_H=norm_H, k_norm_H=norm_H, backend="triton")
        heads.prepare_heads(q, 8, 4, table, slots, cache, slots, interleaved=True, backend="triton")
        heads.prepare_heads(q, 16, 0, table, slots, cache, slots, backend="triton")


def compile_quantized() -> None:
    """Every kind of product: of few rows in 16 bits, and in eight at rows for each tile of the table."""
    for rows in (1, 8):
        x, weight = torch.zeros(rows, 4096, dtype=torch.bfloat16), torch.zeros(4096, 4096, dtype=torch.bfloat16)
        few_rows_matmul.few_rows_matmul(x, weight, residual_TO=torch.zeros_like(x), backend="triton")
        few_rows_matmul.few_rows_matmul(x, weight, weight[0], gate="silu", backend="triton")
    for rows in (8, 48, 4096):
        x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
        for bits, group in ((4, 128), (4, 32), (4, None), (8, 128), (8, None)):
            scales = torch.zeros(384, 1024 // (group or 1024))
            numbers = torch.zeros((384, 1024 * bits // 8), dtype=torch.uint8)
            four = packed_matmul.PackedWeights(numbers, scales, scales.to(torch.uint8), bits, group)
            packed_matmul.packed_matmul(x, four, x[0, :384], backend="triton")
            packed_matmul.packed_matmul(x, replace(four, zeros_OG=None), backend="triton")
            for dtype in (fp8.FP8, torch.int8):
                rounded = torch.zeros(x.shape, dtype=dtype), torch.zeros(rows, 1)
                packed_matmul.packed_rounded_matmul(*rounded, four, x[0, :384], x.dtype, backend="triton")
        codes, table = torch.zeros((384, 512), dtype=torch.uint8), torch.zeros(16)
        for group, scale_dtype, values in ((16, fp8.FP8, None), (32, torch.uint8, None), (64, torch.float32, table)):
            scales = torch.zeros(384, 1024 // group).to(scale_dtype)
            coded = coded_matmul.CodedWeights(codes, values, scales, scales[:, 0].float(), group)
            coded_matmul.coded_matmul(x, coded, x[0, :384], backend="triton")
        weight_scale, block_scales = torch.zeros(384), torch.zeros(3, 8)
        for spec in SPECS:
            numbers, scale = quantize.quantize(x, spec, backend="triton")
            block, weight_scales = (None, weight_scale) if spec.group is None else (spec.group, block_scales)
            weight = torch.zeros((384, 1024), dtype=spec.dtype)
            product = scaled_matmul.scaled_matmul
            product(numbers, scale, weight, weight_scales, weight_scale, x.dtype, block, backend="triton")
            product(x, None, weight, weight_scales, None, x.dtype, block, backend="triton")
        whole = torch.zeros((384, 1024), dtype=torch.int8)
        for fixed in (None, (weight_scale[:1], weight_scale[:1])):
            (numbers, scale), zeros = quantize.quantize_with_zeros(x, fixed, backend="triton")
            shift = scaled_matmul.Shift(zeros, whole.sum(1, dtype=torch.int32))
            scaled_matmul.scaled_matmul(
                numbers, scale, whole, weight_scale, weight_scale, x.dtype, shift=shift, backend="triton"
            )


def compile_experts() -> None:
    """Every form of experts' products, at rows for each tile of the table."""
    num_experts, top_k = 8, 2
    for rows in (16, 128, 4096):
        x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
        chosen = torch.zeros((rows, top_k), dtype=torch.int32)
        blocks = expert_blocks.align_experts(chosen, num_experts, backend="triton")
        product = experts.grouped_matmul
        plain = experts.ExpertWeights(torch.zeros((num_experts, 512, 1024), dtype=x.dtype))
        product(x, plain, blocks, x.dtype, top_k=top_k, gate="silu", backend="triton")
        biased = replace(plain, bias_EO=torch.zeros((num_experts, 512), dtype=x.dtype))
        product(x, biased, blocks, x.dtype, top_k=top_k, gate="swigluoai", backend="triton")
        product(x.repeat(top_k, 1), biased, blocks, x.dtype, backend="triton")
        codes = torch.zeros((num_experts, 512, 512), dtype=torch.uint8)
        four = replace(biased, values_EOI=codes, scales=codes[..., :32].contiguous())
        product(x, four, blocks, x.dtype, top_k=top_k, gate="swigluoai", backend="triton")
        product(x.repeat(top_k, 1), four, blocks, x.dtype, backend="triton")
        for bits, group in ((4, 128), (4, 32), (4, None), (8, 128)):
            rows_of_all, width = num_experts * 512, 1024 * bits // 8
            scales = torch.zeros(rows_of_all, 1024 // (group or 1024))
            zeros = scales.to(torch.uint8)
            packed = packed_matmul.PackedWeights(zeros.new_zeros(rows_of_all, width), scales, zeros, bits, group)
            grouped = packed_experts.grouped_packed_matmul
            grouped(x, packed, num_experts, blocks, x.dtype, top_k=top_k, gate="silu", backend="triton")
            unshifted = replace(packed, zeros_OG=None)
            grouped(x.repeat(top_k, 1), unshifted, num_experts, blocks, x.dtype, backend="triton")
            for spec in (SPECS[0], SPECS[-1]):
                numbers = quantize.quantize(x, spec, backend="triton")
                grouped(numbers, packed, num_experts, blocks, x.dtype, top_k=top_k, gate="silu", backend="triton")
        codes, table = torch.zeros((num_experts * 512, 512), dtype=torch.uint8), torch.zeros(16)
        for group, scale_dtype, values in ((16, fp8.FP8, None), (32, torch.uint8, None), (64, torch.float32, table)):
            scales = torch.zeros(len(codes), 1024 // group).to(scale_dtype)
            factor = scales[:, 0].float() if group == 16 else None
            coded = coded_matmul.CodedWeights(codes, values, scales, factor, group)
            coded_product = coded_experts.grouped_coded_matmul
            coded_product(x, coded, num_experts, blocks, top_k=top_k, gate="silu", backend="triton")
            coded_product(x.repeat(top_k, 1), coded, num_experts, blocks, backend="triton")
        packed_experts.order_inputs(x, torch.zeros((num_experts, 1024), dtype=torch.int32), chosen, backend="triton")
        out = product(x.repeat(top_k, 1), plain, blocks, x.dtype, backend="triton")
        experts.combine_experts(out, chosen.float(), chosen, backend="triton")
        compile_rounded_experts(x, blocks, num_experts, top_k)


def compile_rounded_experts(x: torch.Tensor, blocks: expert_blocks.ExpertBlocks, num_experts: int, top_k: int) -> None:
    """With matrices of eight bits, and inputs in as many or not."""
    product = experts.grouped_matmul
    for spec in SPECS:
        values = torch.zeros((num_experts, 512, 1024), dtype=spec.dtype)
        scales = torch.zeros((num_experts, 512) if spec.group is None else (num_experts, 4, 8))
        weights = experts.ExpertWeights(values, scales, spec.group)
        numbers = quantize.quantize(x, spec, backend="triton")
        for given in (numbers, x):
            product(given, weights, blocks, x.dtype, top_k=top_k, gate="silu", backend="triton")
        product(
            quantize.quantize(x.repeat(top_k, 1), spec, backend="triton"),
            weights,
            blocks,
            x.dtype,
            backend="triton",
        )
        if spec.dtype == torch.int8:
            shift = scaled_matmul.Shift(torch.zeros(len(x), 1), scales.to(torch.int32))
            product(numbers, weights, blocks, x.dtype, top_k=top_k, gate="silu", shift=shift, backend="triton")
            one = shift._replace(zeros_T=torch.zeros(1))
            product(numbers, weights, blocks, x.dtype, top_k=top_k, shift=one, backend="triton")


def compile_latents() -> None:
    """DeepSeek's widths over heads of whole models and of ranks, in 16 and in 8 bits: decodes, parts and prompts."""
    index = torch.zeros(9, dtype=torch.int32)
    tables = torch.zeros(8, 64, dtype=torch.int32)
    for stored, block_size in ((torch.bfloat16, 16), (torch.bfloat16, 64), (fp8.FP8, 16), (fp8.FP8, 64)):
        pages = torch.zeros(4, 2, block_size, 576, dtype=stored)[:, 1]
        for num_heads in (4, 16, 32, 128):
            q = torch.zeros(num_heads, 8, 576, dtype=torch.bfloat16).transpose(0, 1)
            for longest, num_splits in ((1, 1), (1, 8), (4096, 8)):
                latent_attention.latent_attention(
                    q, pages, tables, index, index[:8], longest,
                    rank=512, scale=1.0, num_splits=num_splits, backend="triton",
                )  # fmt: skip
        for interleaved in (True, False):
            latents.prepare_latents(
                torch.zeros(8, 128, 192, dtype=torch.bfloat16), torch.zeros(8, 576, dtype=torch.bfloat16),
                torch.zeros(512, dtype=torch.bfloat16), torch.zeros(64, 64), index[:8], pages, index[:8],
                eps=1e-6, interleaved=interleaved, backend="triton",
            )  # fmt: skip


def compile_step() -> None:
    device = torch.device("cpu")
    buffers = step_inputs.StepBuffers.allocate(2, 256, 8192, 128, device)
    tokens, tables = torch.zeros((256, 2048), dtype=torch.int32), torch.zeros((2, 256, 128), dtype=torch.int32)
    rows, writes = torch.zeros((200, 4), dtype=torch.int32), torch.zeros((9, 3), dtype=torch.int64)
    step_inputs.prepare_step(tokens, tables, rows, 16, buffers, 8192, backend="triton")
    step_inputs.scatter_writes(tokens.view(-1), writes, tables.view(-1), backend="triton")
    nonfinite.flag_nonfinite(torch.zeros((8, 2048), dtype=torch.bfloat16), backend="triton")
    pool = torch.zeros(KVLayout(4, 2, 4, 16, 96).shape, dtype=torch.float8_e4m3fn)
    flags, slots = torch.zeros(8, dtype=torch.bool), torch.zeros((2, 8), dtype=torch.int64)
    nonfinite.scrub_slots(pool, slots, flags, backend="triton")


def compile_rank_sum() -> None:
    memory = rank_sum.PeerMemory(
        0, torch.zeros(8), torch.zeros(8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    )
    for dtype in rank_sum.DTYPES:
        rank_sum.sum_ranks_(torch.zeros(4096, dtype=dtype), memory, backend="triton")


def compile_sampling(dtype: torch.dtype) -> None:
    logits, lens, slots = torch.zeros(4, 151_936, dtype=dtype), torch.zeros(4, dtype=torch.int32), torch.arange(4)
    tokens, counts = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, 151_936, dtype=torch.int32)
    zeros, ones = np.zeros(4, dtype=np.int64), np.ones(4)
    for temperature, record in (
        (0 * ones, TokenRecord(tokens, slots)),
        (ones, TokenRecord(tokens, slots, counts, slots)),
    ):
        parameters = RowParameters(
            zeros.view(np.uint64), zeros, temperature, zeros + 5, 0.5 * ones, -ones.astype(np.float32)
        )
        rows = SamplingRows(parameters, logits.device)
        sampling.sample_tokens(logits, rows, lens, record, backend="triton")
    allowed = torch.zeros((4, token_mask.num_words(151_936)), dtype=torch.int32)
    token_mask.mask_tokens_(logits, allowed, backend="triton")
    history = sampling_edits.History(tokens, slots, lens)
    listed = sampling_edits.ListedTokens(slots, torch.zeros(4), slots)
    words = sampling_edits.BadWords(torch.zeros((3, 5), dtype=torch.int32), slots[:3], slots[:3])
    penalties = sampling_edits.Penalties(slots, slots, slots, torch.ones(3, 4))
    edited = sampling_edits.edit_listed(logits, listed, backend="triton")
    sampling_edits.ban_bad_words_(edited, words, history, backend="triton")
    sampling_edits.penalise_(edited, penalties, counts, history, 1, backend="triton")


def compile_others() -> None:
    """Every kernel but attention and products, in bfloat16."""
    compile_elementwise(torch.bfloat16)
    compile_sampling(torch.bfloat16)
    compile_sampling(torch.float32)
    compile_step()
    compile_rank_sum()


def compile_set(name: str) -> None:
    """One set, as the file's docstring names them."""
    kind, *options = name.split(":")
    if kind == "others":
        compile_others()
    elif kind == "products":
        compile_quantized()
    elif kind == "latents":
        compile_latents()
    elif kind == "experts":
        compile_experts()
    elif kind == "groups":
        compile_groups(int(options[0]), [int(group) for group in options[1:]] or range(1, 9))
    else:
        head_dim, dtype = int(options[0]), getattr(torch, options[1])
        compile_attention_features(head_dim, dtype)
        compile_attention(attention_inputs(head_dim, dtype, dtype), 512 if head_dim == 256 else None)


def main(capability: int, sets: Sequence[str], *, first: bool) -> None:
    """Compile for an architecture all that the sets hold, or the first of each kind."""
    seen: set[Hashable] | None = set() if first else None
    for module in MODULES:
        vars(module)["choose_backend"] = lambda device, backend: backend
        vars(module)["architecture"] = lambda device: f"sm_{capability}"
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            vars(module)[name] = CompileOnly(vars(module)[name], capability, seen)
    for name in sets:
        compile_set(name)


if __name__ == "__main__":
    names = [name for name in sys.argv[2:] if name != "--first"]
    main(int(sys.argv[1]), names, first="--first" in sys.argv)
