"""docs/models.md says what the engine builds, from the table of its models: run this file to write it anew. Names of
models are kept as they stand there. And mkdocs.yml names every document."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import yaml
from pagefleet_engine.bench.shapes import named_shapes
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.models.arch import ExpertsArch, ModelArch
from pagefleet_engine.models.config_file import arch_from_config
from pagefleet_engine.models.model import MODEL_MODULES, build_model
from pagefleet_engine.models.parameters import count_parameters
from pagefleet_engine.worker.compile import compile_model
from pagefleet_protocol.model_config.gguf_names import our_tensors

from tests.fakes.coded_checkpoints import Coded
from tests.fakes.native_kernels import native_library
from tests.fakes.packed_checkpoints import Packed
from tests.fakes.quantized_checkpoints import Recipe
from tests.fakes.torchao_checkpoints import Stored

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "models.md"
PLAIN = Placement(torch.bfloat16, torch.device("cpu"), use_kernels=False)
ROPES = {"yarn": "YaRN", "longrope": "LongRoPE", "llama3": "Llama 3's scaling", "linear": "linear scaling"}


def part(name: str) -> re.Pattern[str]:
    """What stands between the marks of a table."""
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)


def shape_of(kind: str) -> tuple[str, Mapping[str, Any]]:
    """The first published shape of a kind of model; of one of pictures too, that of its text."""
    kinds = (kind, f"{kind}_text")
    return next((name, shape) for name, shape in named_shapes().items() if shape["model_type"] in kinds)


def models_table() -> str:
    named = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", DOCUMENT.read_text(), re.MULTILINE))
    heads = ("`model_type`", "models", "GGUF", "not with", "`--shape`", "parameters", "K/V of a token, kB", "made of")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for kind in MODEL_MODULES:
        name, config = shape_of(kind)
        arch = arch_from_config(config, name)
        count = count_parameters(arch)
        sizes = (
            f"{billions(count.total)}"
            if count.active == count.total
            else f"{billions(count.total)}, {billions(count.active)}"
        )
        kept = 2 * len(arch.kept_windows) * arch.kv.numbers / 1000
        cells = [
            f"`{kind}`",
            named.get(kind, "?"),
            "yes" if has_gguf(kind) else "",
            ", ".join(limits(arch)),
            f"`{name}`",
            sizes,
            f"{kept:.1f}",
        ]
        rows.append("| " + " | ".join([*cells, "; ".join(made_of(arch))]) + " |")
    return "\n".join(rows) + "\n"


def has_gguf(kind: str) -> bool:
    try:
        return our_tensors(kind, "blk.0.attn_q.weight", 1, tied=False) is not None
    except KeyError:
        return False


def billions(count: int) -> str:
    return f"{count / 1e9:,.0f} B" if count >= 1e11 else f"{count / 1e9:.3g} B"


def limits(arch: ModelArch) -> Iterator[str]:
    """Options that refuse it, as they are asked."""
    brief, place = arch.for_length(256), replace(PLAIN, traceable=True, layers=range(1))
    with tempfile.TemporaryDirectory() as folder, patch("torch.compile"):
        try:
            compile_model(build_model(brief, place), Path(folder), torch.bfloat16, place.device)
        except ConfigError:
            yield "`--compile`"


def made_of(arch: ModelArch) -> Iterator[str]:
    """What is not as in Llama 2."""
    layers, local = arch.num_layers, [window for window in arch.windows if window and window < arch.context_length]
    shape = "chunks" if arch.chunked else "windows"
    kinds = {rope.rope_type for rope in arch.ropes}
    if arch.experts is not None:
        yield from experts_of(arch.experts, layers)
    parts = {
        "latent attention": arch.latent is not None,
        f"{shape} of {max(local, default=0):,} in {len(local)} of {layers} layers": bool(local),
        f"K/V in {len(arch.kept_windows)} of {layers} layers": bool(arch.num_kv_shared_layers),
        "several streams (AltUp)": arch.altup is not None,
        "ALiBi": bool(arch.alibi_slopes),
        "learned positions": bool(arch.position_rows),
        **{said: kind in kinds for kind, said in ROPES.items()},
        "soft caps": arch.attention_softcap is not None or arch.final_softcap is not None,
    }
    yield from (said for said, holds in parts.items() if holds)


def experts_of(experts: ExpertsArch, num_layers: int) -> Iterator[str]:
    routing = experts.routing
    groups = (
        f", of {routing.top_groups} of {routing.num_groups} groups" if routing.top_groups < routing.num_groups else ""
    )
    sparse = sum(experts.layers)
    where = "" if sparse == num_layers else f" in {sparse} of {num_layers} layers"
    yield f"{routing.top_k} of {routing.num_experts} experts{groups}, by {routing.scoring}{where}"
    if experts.shared_intermediate_size:
        yield "and shared ones"


SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


class Column(NamedTuple):
    """Where matrices stand."""

    kind: str
    matrices: str
    """Part of their names; all have as many numbers together."""
    use_kernels: bool


COLUMNS = {
    "GPU": Column("llama", "layers.0.mlp.down_proj", True),
    "GPU, experts": Column("qwen3_moe", "layers.0.mlp.experts.0.down_proj", True),
    "GPU, experts in one tensor": Column("granitemoe", "layers.0.block_sparse_moe.output_linear", True),
    "CPU, experts": Column("qwen3_moe", "layers.0.mlp.experts.0.down_proj", False),
    "CPU, experts in one tensor": Column("granitemoe", "layers.0.block_sparse_moe.output_linear", False),
}
FORMS: dict[str, dict[str, Any] | None] = {
    "float32, float16, bfloat16": None,
    "FP8 per tensor": Recipe("float", "tensor").config(),
    "FP8 per tensor, inputs too (fixed)": Recipe("float", "tensor", "tensor").config(),
    "FP8 per channel": Recipe("float", "channel").config(),
    "FP8 in blocks": Recipe("float", "block", "group", (64, 64), plain_fp8=True).config(),
    "FP8, weights alone": Recipe("float", "channel", "none").config(),
    "INT8 (W8A8)": Recipe("int", "channel").config(),
    "INT4 (W4A16), compressed-tensors": Packed("pack-quantized").config(),
    "INT8 (W8A16), compressed-tensors": Packed("pack-quantized", 8).config(),
    "INT4 (W4A16) in act order, compressed-tensors": Packed("pack-quantized", ordered=True).config(),
    "INT4, inputs in INT8 (W4A8)": Packed("int-quantized", inputs="int").config(),
    "AWQ": Packed("awq", zeros=True).config(),
    "GPTQ of 4 bits": Packed("gptq").config(),
    "GPTQ of 4 bits in act order": Packed("gptq", ordered=True).config(),
    "GPTQ of 8 bits": Packed("gptq_v2", 8).config(),
    "NVFP4, compressed-tensors": Coded("nvfp4-pack-quantized").config(),
    "NVFP4, ModelOpt": Coded("modelopt").config(),
    "MXFP4, compressed-tensors": Coded("mxfp4-pack-quantized").config(),
    "MXFP4, gpt-oss": {"quant_method": "mxfp4"},
    "bitsandbytes nf4": Coded("nf4").config(),
    "bitsandbytes INT8": Coded("int8").config(),
    "torchao INT4": Stored("int4").config(),
    "HQQ of 4 bits": Stored("hqq").config(),
}


def forms_table() -> str:
    rows = [f"| weights | {' | '.join(COLUMNS)} |", "|" + "---|" * (1 + len(COLUMNS))]
    for name, quantization in FORMS.items():
        columns = of_gpt_oss() if name.endswith("gpt-oss") else [*COLUMNS.values()]
        cells = ["" if column is None else kept(column, quantization) for column in columns]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def of_gpt_oss() -> list[Column | None]:
    """Its experts alone are in MXFP4, in one tensor."""
    stacked = [column if column.kind == "granitemoe" else None for column in COLUMNS.values()]
    return [
        column and column._replace(kind="gpt_oss", matrices="layers.0.mlp.experts.down_proj_") for column in stacked
    ]


def kept(column: Column, quantization: dict[str, Any] | None) -> str:
    """In how many bits matrices are kept, by a model of random weights."""
    section = {} if quantization is None else {"quantization_config": quantization}
    try:
        arch = arch_from_config(SMALL | {"model_type": column.kind} | section, "config.json")
        native = None if column.use_kernels else native_library()
        place = replace(PLAIN, use_kernels=column.use_kernels, native=native)
        model = load_model(Path(), arch, place, "dummy", 0)
    except ModelLoadError:
        return "refused"
    slots = [(name, weight) for name, weight in model.weights() if column.matrices in name]
    bits = 8 * sum(weight.nbytes for _, weight in slots) / numbers_of(column)
    is_stored_so = all(name.endswith(".weight") and weight.dtype == place.dtype for name, weight in slots)
    return f"{8 if bits >= 8 else 4} bits" if bits < 16 else "16 bits" if is_stored_so else "expanded"


def numbers_of(column: Column) -> int:
    each: int = SMALL["hidden_size"] * SMALL["intermediate_size"]
    return each * (1 if column.kind in ("llama", "qwen3_moe") else SMALL["num_experts"])


TABLES = {"models": models_table, "forms": forms_table}


@pytest.mark.parametrize("name", TABLES)
def test_the_document_shows_the_table(name: str) -> None:
    shown = part(name).search(DOCUMENT.read_text())
    assert shown is not None
    assert shown[0] == TABLES[name](), "run python -m tests.architecture.test_models_document"
    assert "| ? |" not in shown[0], "name the models"


def pages(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for where in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(where) if isinstance(where, list) else [where]


def test_the_site_shows_every_document() -> None:
    shown = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert not [page for page in shown if not (ROOT / page).exists()]
    assert {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} <= set(shown)
    assert len(shown) == len(set(shown))


if __name__ == "__main__":
    for table, made in TABLES.items():
        DOCUMENT.write_text(part(table).sub(made(), DOCUMENT.read_text()))
