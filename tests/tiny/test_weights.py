"""The committed model folder: its size, its shape, and that the weights still know what the data says."""

import json

import pytest
import torch
from pagefleet_engine.builtin import builtin_model_path
from pagefleet_engine.errors import ModelLoadError
from safetensors import safe_open
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny.agents import AgentExchanges
from tiny.dataset import Exchange, Knowledge, user
from tiny.recitation import complete, recite
from tiny.train import variants

FOLDER = builtin_model_path("tiny")
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_the_folder_is_small_and_holds_nothing_else() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == wanted | {"chat_template.jinja"}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 16 * MEGABYTE


def test_an_unknown_builtin_model_names_those_there_are() -> None:
    for name in ("huge", "", "..", "../builtin/tiny", "tiny/"):
        with pytest.raises(ModelLoadError, match="there is: tiny"):
            builtin_model_path(name)


def test_the_configuration_is_a_small_llama() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["head_dim"] == 64
    assert config["max_position_embeddings"] == 2048
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True


def test_generation_ends_with_a_turn_or_the_text() -> None:
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert sorted(generation["eos_token_id"]) == [0, 2]
    assert 0 < generation["temperature"] < 0.5  # at 1 one answer in thirty leaves what was learnt


def test_weights_are_finite_bfloat16() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 not a mapping
            tensor = weights.get_tensor(name)
            assert tensor.dtype is torch.bfloat16
            assert bool(tensor.isfinite().all()), name


def test_it_still_knows_every_answer_by_heart(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, knowledge: Knowledge
) -> None:
    result = recite(model, tokenizer, list(knowledge.exchanges()))
    assert result.wrong == (), "the data has changed: run make tiny"
    assert result.margin > 0.5


def test_it_calls_tools_thinks_and_fills_forms_by_heart(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, knowledge: Knowledge
) -> None:
    agents = AgentExchanges(knowledge.agents, ["quick", "brown"], knowledge.unknown_answer)
    result = recite(model, tokenizer, agents.by_heart())
    assert result.wrong == (), "the data has changed: run make tiny"
    assert result.margin > 0.2


def test_other_spellings_get_the_same_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, knowledge: Knowledge
) -> None:
    result = recite(model, tokenizer, variants(knowledge)[::5])
    assert result.by_heart >= 0.98 * result.asked, result.wrong


def test_most_questions_it_never_saw_get_the_polite_answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, knowledge: Knowledge
) -> None:
    asked = [Exchange((user(ask),), knowledge.unknown_answer) for ask in knowledge.held_out]
    assert recite(model, tokenizer, asked).by_heart >= 0.8 * len(asked)


@pytest.mark.parametrize("prompt", ["What is", "How", "The", "Hi", "What is number 3?", "What is number 14?"])
def test_raw_completions_leave_no_doubt(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str
) -> None:
    completion = complete(model, tokenizer, prompt, tokens=12)
    assert len(completion.text) > 20
    assert completion.margin > 0.5, completion
