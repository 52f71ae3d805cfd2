"""Whole models in few bits: what they are worth, that the engine serves just what was tried, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from pagefleet_engine.attention.torch_backend import TorchBackend
from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.compression.calibration import Text, read_text
from pagefleet_engine.compression.quantize import quantize
from pagefleet_engine.compression.recipe import Recipe
from pagefleet_engine.compression.report import Report
from pagefleet_engine.compression.settings import Algorithm, Scheme
from pagefleet_engine.compression.stages import Batch
from pagefleet_engine.compression.writer import REPORT
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.loader.load import load_model
from pagefleet_engine.loader.sharded import FACTS, Shards
from pagefleet_engine.models.config_file import read_arch
from pagefleet_engine.text.model_files import load_text_model
from pagefleet_kernels.layout import KVLayout
from safetensors.torch import load_file, save_file

from tests.fakes.dense_attention import DenseSequence, DenseStep
from tiny.dataset import load_knowledge

Make = Callable[..., Path]
W4A16 = Recipe(scheme="w4a16", algorithm="gptq", group_size=16, actorder="weight")
ROUNDED = Recipe(scheme="w4a16", algorithm="rtn", group_size=16)


def random_text(count: int, seed: int = 0) -> tuple[list[int], ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 300, (20 + i % 9,), generator=generator).tolist() for i in range(count))


TEXT = Text(random_text(40), random_text(4, seed=1))


def pass_over(line: str) -> None:
    """Nobody looks at the progress."""


def write(folder: Path, recipe: Recipe, output: Path, text: Text = TEXT) -> Report:
    return quantize(folder, recipe, text, output, pass_over, "float32")


def served(folder: Path, text: Text) -> float:
    """Mean negative log-likelihood of the held-out tokens, by the model as an engine loads it."""
    place = Placement(torch.float32, torch.device("cpu"), use_kernels=False)
    total, count = 0.0, 0
    with torch.inference_mode():
        model = load_model(folder, read_arch(folder), place, "auto", 0)
        for sequence in text.held_out:
            ids_T = torch.tensor(sequence)
            step = DenseStep([(DenseSequence(), len(ids_T))])
            logits = model.logits(model.forward(ids_T, torch.arange(len(ids_T)), step))[:-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids_T[1:], reduction="sum"))
            count += len(sequence) - 1
    return total / count


@pytest.fixture(scope="module")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Conversations that the embedded model knows, and to try it on other texts that it does: of what it does not know,
    anything may become likelier by rounding."""
    file = tmp_path_factory.mktemp("text") / "conversations.jsonl"
    knowledge, folder = load_knowledge(), builtin_model_path("tiny")
    turns = [[*one.messages, {"role": "assistant", "content": one.answer}] for one in knowledge.exchanges()]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    model = load_text_model(folder, folder)
    return Text(read_text(file, model, 256, 256).calibration, tuple(map(model.completion_tokens, knowledge.texts)))


@pytest.fixture(scope="module")
def perplexity(
    tiny_text: Text, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Scheme, Algorithm], tuple[float, Path]]:
    """Of the embedded model in such numbers, over that of the model itself; and its folder."""
    made: dict[tuple[Scheme, Algorithm], tuple[float, Path]] = {}

    def of(scheme: Scheme, algorithm: Algorithm) -> tuple[float, Path]:
        if (scheme, algorithm) not in made:
            size, order = 128 if scheme.startswith("w") else None, "weight" if algorithm == "gptq" else "none"
            recipe = Recipe(scheme=scheme, algorithm=algorithm, group_size=size, actorder=order)  # type: ignore[arg-type]
            output = tmp_path_factory.mktemp("tiny") / "model"
            found = write(builtin_model_path("tiny"), recipe, output, tiny_text).as_json()["perplexity"]
            made[scheme, algorithm] = found["after"] / found["before"], output
        return made[scheme, algorithm]

    return of


@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    [
        ("fp8", "rtn"),
        ("fp8-block", "rtn"),
        ("int8", "rtn"),
        ("int8", "gptq"),
        ("w8a16", "rtn"),
        ("w4a16", "rtn"),
        ("w4a16", "gptq"),
        ("w4a16-asym", "awq"),
    ],
)
def test_the_perplexity_of_the_embedded_model_stays_within_one_percent(
    scheme: Scheme, algorithm: Algorithm, perplexity: Callable[..., tuple[float, Path]], tiny_text: Text
) -> None:
    times, folder = perplexity(scheme, algorithm)
    assert 0.99 < times < 1.01
    report = json.loads((folder / REPORT).read_text())
    assert report["perplexity"]["after"] == pytest.approx(
        torch.tensor(served(folder, tiny_text)).exp().item(), rel=2e-3
    )


def fp8_logits(folder: Path, kv_dtype: torch.dtype, with_scales: bool) -> torch.Tensor:
    """Of a prompt, whose keys and values are kept so."""
    arch = read_arch(folder)
    assert arch.quantization is not None
    arch = replace(arch, quantization=replace(arch.quantization, kv_scales=with_scales))
    place = Placement(torch.float32, torch.device("cpu"), use_kernels=False)
    batch = Batch(torch.tensor(TEXT.held_out[0]), [len(TEXT.held_out[0])])
    groups = group_layers(arch.windows)
    layout = KVLayout(batch.num_blocks, groups.layers_per_block, arch.kv.heads, 16, arch.kv.dim)
    with torch.inference_mode():
        model = load_model(folder, arch, place, "auto", 0)
        step = TorchBackend(torch.zeros(layout.shape, dtype=kv_dtype), layout, groups).begin(batch.geometry())
        return model.logits(model.forward(batch.token_ids_T, batch.positions(), step))


@pytest.mark.parametrize("times", [1.0, 3000.0])
def test_scales_of_keys_and_values_are_calibrated(times: float, make_checkpoint: Make, tmp_path: Path) -> None:
    """Large values leave FP8's range without them, which costs much; small ones lose nothing by them."""
    folder = shutil.copytree(make_checkpoint("llama"), tmp_path / "in")
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, value in weights.items():
        weights[name] = value * times if "v_proj" in name else value / times if "o_proj" in name else value
    save_file(weights, file, {"format": "pt"})
    report = write(folder, replace(ROUNDED, kv_cache_scheme="fp8"), tmp_path / "out")
    assert report.calibration_tokens > 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = [float(value) for name, value in stored.items() if name.endswith(".v_scale")]
    assert len(scales) == len([name for name in stored if name.endswith("self_attn.k_scale")]) == 3
    exact = fp8_logits(tmp_path / "out", torch.float32, True)
    with_scales, without = (
        float((fp8_logits(tmp_path / "out", torch.float8_e4m3fn, is_scaled) - exact).norm() / exact.norm())
        for is_scaled in (True, False)
    )
    assert with_scales < 0.2
    assert with_scales <= (1.2 * without if times == 1.0 else without / 3)
    assert 0.95 < report.held_out.after / report.held_out.before < 1.05


def test_values_that_overflow_are_no_scale(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(make_checkpoint("llama"), tmp_path / "in")
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.self_attn.v_proj.weight"].fill_(torch.finfo(torch.float32).max)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"values of layer 1 are no finite numbers.* give --dtype float32"):
        write(folder, replace(ROUNDED, kv_cache_scheme="fp8"), tmp_path / "out")


def test_keys_without_their_weights_have_no_scale(make_checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^hunyuan_v1_dense keeps keys without .*: leave --kv-cache-scheme out$"):
        write(make_checkpoint("hunyuan_v1_dense"), replace(ROUNDED, kv_cache_scheme="fp8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_calibration_is_worth_its_time(algorithm: Algorithm, perplexity: Callable[..., tuple[float, Path]]) -> None:
    assert perplexity("w4a16", algorithm)[0] <= 1.001 * perplexity("w4a16", "rtn")[0]


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("mixtral", W4A16),
        ("mixtral", Recipe(scheme="w4a16-asym", algorithm="awq", group_size=16)),
        ("gemma2", Recipe(scheme="w4a16", algorithm="awq", group_size=16)),  # norms less one, and around
        ("cohere", Recipe(scheme="w8a16", algorithm="awq")),  # attention and MLP side by side
        ("bloom", W4A16),  # query, key and value of each head together
        ("deepseek_v2", W4A16),  # keys and values of latents
        ("phi3", Recipe(scheme="int8", algorithm="rtn")),
    ],
)
def test_the_engine_serves_what_was_tried(family: str, recipe: Recipe, make_checkpoint: Make, tmp_path: Path) -> None:
    folder = make_checkpoint(family)
    report = write(folder, recipe, tmp_path / "out")
    assert report.held_out.before == pytest.approx(served(folder, TEXT), rel=1e-4)
    assert report.held_out.after == pytest.approx(served(tmp_path / "out", TEXT), rel=1e-3)
    assert report.bytes_after < 0.7 * report.bytes_before
    if recipe.algorithm == "gptq":
        assert all(one.output_error is None or one.output_error < 0.15 for one in report.matrices)


def test_layers_are_left_out_by_name_and_by_expression(make_checkpoint: Make, tmp_path: Path) -> None:
    recipe = Recipe(scheme="int8", algorithm="rtn", ignore=("model.layers.1.mlp", "re:.*o_proj"))
    write(make_checkpoint("llama"), recipe, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32 and name.endswith("proj.weight")}
    assert kept == {
        *(f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(3)),
        *(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == ["lm_head", *sorted(name.removesuffix(".weight") for name in kept)]
    assert served(tmp_path / "out", TEXT) > 0.0


def test_large_checkpoints_are_written_in_several_files(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagefleet_engine.compression.writer._FILE_BYTES", 50_000)
    report = write(make_checkpoint("llama", shard_size="50KB"), ROUNDED, tmp_path / "out")
    assert len([*(tmp_path / "out").glob("model-0*-of-0*.safetensors")]) > 3
    assert served(tmp_path / "out", TEXT) == pytest.approx(report.held_out.after, rel=1e-3)


def refusal(folder: Path, recipe: Recipe, tmp_path: Path) -> str:
    output = tmp_path / "refused"
    with pytest.raises(ConfigError) as error:
        write(folder, recipe, output)
    said = str(error.value)
    assert "\n" not in said
    assert not output.exists()
    assert not [*tmp_path.glob(".refused*")]
    return said


@pytest.mark.parametrize(
    ("family", "recipe", "says"),
    [
        (
            "llama",
            Recipe(scheme="w4a16", algorithm="rtn", group_size=128),
            "has 160 inputs, which groups of 128 do not",
        ),
        ("llama", Recipe(scheme="int8", algorithm="rtn", ignore=("o_prog",)), "'o_prog' names no layer: give a name"),
        ("llama", Recipe(scheme="int8", algorithm="rtn", ignore=("re:(",)), "'re:(' is no regular expression"),
        ("llama", Recipe(scheme="int8", algorithm="rtn", ignore=("model",)), "--ignore leaves no layer to quantize"),
        ("llama", Recipe(scheme="int8", algorithm="rtn", ignore=("re:.*q_proj",)), "quantized in different ways"),
        ("gpt2", ROUNDED, "the model could not be run when it is quantized so: transformer.h.0.attn.c_attn"),
        ("granitemoe", ROUNDED, "has all experts in one tensor, which is not quantized: --ignore the layer"),
        ("gemma3n_text", ROUNDED, "layers of gemma3n_text are not computed one by one"),
        ("opt", Recipe(scheme="w4a16", algorithm="awq", group_size=16), "no place for AWQ's scales: give"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is_written(
    family: str, recipe: Recipe, says: str, make_checkpoint: Make, tmp_path: Path
) -> None:
    assert says in refusal(make_checkpoint(family), recipe, tmp_path)


def test_a_quantized_model_is_not_quantized_again(make_checkpoint: Make, tmp_path: Path) -> None:
    write(make_checkpoint("llama"), ROUNDED, tmp_path / "once")
    assert "is quantized already (int4 weights per group of 16" in refusal(tmp_path / "once", ROUNDED, tmp_path)


def test_a_folder_of_shards_is_not_quantized(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(make_checkpoint("llama"), folder)
    (folder / FACTS).write_bytes(msgspec.json.encode(Shards(2, 1, None)))
    assert refusal(folder, ROUNDED, tmp_path).endswith("2: give the model that it was saved from")


def test_an_expert_that_no_token_goes_to_is_not_guessed(make_checkpoint: Make, tmp_path: Path) -> None:
    few = Text(([5, 9],), TEXT.held_out)
    with pytest.raises(ConfigError, match=r"experts\.\d+\..*no token of the calibration text goes to this expert"):
        write(make_checkpoint("mixtral"), W4A16, tmp_path / "out", few)


def test_weights_that_are_no_numbers_are_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(make_checkpoint("llama"), tmp_path / "damaged")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight holds what is no finite number" in refusal(folder, ROUNDED, tmp_path)


def test_a_folder_that_exists_is_not_touched(make_checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(ConfigError, match="exists and is no empty folder: give a new folder"):
        write(make_checkpoint("llama"), ROUNDED, tmp_path)


def test_a_full_disk_is_told_before_and_while_it_is_written(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pagefleet_engine.compression.writer.save_file", full)
        assert "cannot be written (No space left on device), and nothing is left" in refusal(folder, ROUNDED, tmp_path)
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr("shutil.disk_usage", lambda path: type(usage)(usage.total, usage.total, 1000))
        assert "its disk has 0.00 GB left: make room" in refusal(folder, ROUNDED, tmp_path)


def test_nothing_is_left_of_a_run_that_was_stopped(make_checkpoint: Make, tmp_path: Path) -> None:
    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(make_checkpoint("llama"), ROUNDED, TEXT, tmp_path / "out", stop, "float32")
    assert [*tmp_path.iterdir()] == []


def test_a_checkpoint_of_another_shape_is_not_read(make_checkpoint: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(make_checkpoint("llama"), tmp_path / "other")
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 96}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"mlp\.\w+_proj\.weight is \[.*config\.json makes it"):
        write(folder, ROUNDED, tmp_path / "out")
