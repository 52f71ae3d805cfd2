"""Logits processors of another package: they edit what they take part in, and nothing that they do harms others."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.engine_core.messages import AddRequest
from pagefleet_engine.engine_core.model_folder import resolve_model_folder
from pagefleet_engine.errors import ConfigError, InvalidRequest, RequestFailed
from pagefleet_engine.settings import engine_config
from pagefleet_engine.text.model_files import load_tokenizer
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from tests.fakes.offline_core import core_of
from tests.fakes.small_model import write_small_model
from tests.fakes.stream_site import ROUTES, open_site

PLUGIN = Path(__file__).parent / "plugin"
PROMPTS = ["the quick", "one", "of all the words"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGIN)
        yield


def load(folder: Path, *processors: str, **settings: Any) -> LLM:
    defaults = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8, "device": "cpu"}
    return LLM(str(folder), logits_processors=list(processors) or None, **{**defaults, **settings})


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        yield llm


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapped"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with load(folder, "only", "faulty", async_scheduling=request.param) as llm:
        yield llm


def tokens(llm: LLM, prompts: list[str], *params: SamplingParams) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(prompts, list(params))]


def params(**extra: Any) -> SamplingParams:
    return SamplingParams(**GREEDY, extra_args=extra or None)


def test_it_edits_its_own_rows_alone(llm: LLM, plain: LLM) -> None:
    before = tokens(plain, PROMPTS, *[params()] * 3)
    edited = tokens(llm, PROMPTS, params(), params(only_token=7, only_from=4), params())
    assert edited[0] == before[0]
    assert edited[2] == before[2]
    assert edited[1] == before[1][:4] + [7] * 8


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_tokens_are_those_that_the_device_has(folder: Path, overlap: bool) -> None:
    """A sampled model with few tokens repeats; under the processor no token is one of the two before."""
    allowed = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, allowed_token_ids=(5, 6, 7, 8), seed=3)
    with load(folder, "no_repeat", async_scheduling=overlap, num_kv_blocks=12) as llm:  # which preempts
        found = tokens(llm, PROMPTS * 2, *[allowed] * 6)
        assert llm.stats().preemptions > 0
    for one in found:
        assert set(one) <= {5, 6, 7, 8}
        assert all(one[at] not in one[max(0, at - 2) : at] for at in range(len(one)))
    with load(folder, async_scheduling=overlap) as other:
        assert any(a == b for one in tokens(other, PROMPTS, *[allowed] * 3) for a, b in itertools.pairwise(one))


@pytest.mark.parametrize("place", ["enter", "edit"])
def test_one_that_raises_ends_its_own_requests(llm: LLM, plain: LLM, place: str) -> None:
    before = tokens(plain, ["one"], params())
    core = core_of(llm)  # what ends and what goes on is told by the core
    for name, each in {"bad": params(fail=place), "good": params()}.items():
        assert core.add(AddRequest(name, llm.llm_engine.read_prompt("one")[1], each, ())) == []
    found: dict[str, list[int]] = {"bad": [], "good": []}
    errors = {}
    while core.has_work:
        for output in core.step():
            found[output.request_id] += output.new_token_ids
            errors[output.request_id] = output.error
    assert errors == {"bad": "A logits processor of this engine failed at this request.", "good": None}
    assert found == {"bad": [], "good": before[0]}
    with pytest.raises(RequestFailed, match="A logits processor of this engine failed"):
        llm.generate("one", params(fail=place))
    assert tokens(llm, ["one"], params()) == before


def test_a_form_is_held_whatever_it_asks_for(folder: Path) -> None:
    form = StructuredOutputsParams(choice=("ab", "cd"))
    with load(folder, "only", "no_repeat") as llm:
        (one,) = llm.generate("x", SamplingParams(max_tokens=8, structured_outputs=form))
        assert one.outputs[0].text in ("ab", "cd")
        (token,) = llm.llm_engine.read_prompt("c")[1]
        held = SamplingParams(temperature=0.0, max_tokens=1, structured_outputs=form, extra_args={"only_token": token})
        assert llm.generate("x", held)[0].outputs[0].text.startswith("c")
        (other,) = llm.llm_engine.read_prompt("x")[1]
        banned = SamplingParams(max_tokens=2, structured_outputs=form, extra_args={"only_token": other})
        with pytest.raises(InvalidRequest) as caught:
            llm.generate("x", banned)
        assert caught.value.code == "no_token_left"


def test_log_probabilities_are_the_model_s_own(llm: LLM, plain: LLM) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    forced = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, extra_args={"only_token": 9})
    (before,), (after,) = plain.generate("one", asked), llm.generate("one", forced)
    assert before.outputs[0].logprobs is not None
    assert after.outputs[0].logprobs is not None
    best = {token: entry.logprob for token, entry in before.outputs[0].logprobs[0].items()}
    own = {token: entry.logprob for token, entry in after.outputs[0].logprobs[0].items() if token != 9}
    assert own == {token: best[token] for token in own}
    assert after.outputs[0].token_ids == [9]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"other": 1}, "reads the extra argument 'other': they read fail, only_from, only_token"),
        ({"only_token": "x"}, "Invalid 'vllm_xargs' for only: only_token takes a token id"),
        ({"only_token": 3, "fail": "check"}, r"processor faulty could not read 'vllm_xargs' \(KeyError\)"),
    ],
)
def test_arguments_that_cannot_be(llm: LLM, extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        llm.generate("one", params(**extra))
    assert len(tokens(llm, ["one"], params())[0]) == 12


def test_an_engine_without_processors_reads_no_arguments(plain: LLM) -> None:
    with pytest.raises(InvalidRequest, match="reads the extra argument 'only_token': it needs --logits-processors"):
        plain.generate("one", params(only_token=3))


def test_functions_of_a_request_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="make a plug-in of them") as caught:
        SamplingParams(logits_processors=[lambda ids, logits: logits])
    assert caught.value.param == "logits_processors"
    assert SamplingParams(logits_processors=None) == SamplingParams()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["nobody"], "--logits-processors 'nobody' is unknown: give one of asleep, broken, empty, faulty, no_repeat"),
        (["only", "only"], "names only twice"),
        (["broken"], "broken cannot be loaded"),
        (["empty"], "empty is no processor: its package must name a ProcessorKind"),
        (["unmade"], r"unmade cannot be made \(OSError: no such table\)"),
    ],
)
def test_names_that_cannot_be(folder: Path, names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(folder, *names)


def test_classes_are_refused_in_one_line(folder: Path) -> None:
    with pytest.raises(TypeError, match="takes names of installed plug-ins"):
        LLM(str(folder), logits_processors=[object])


def test_one_name_in_two_packages_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other_processors-1.0.dist-info"
    shutil.copytree(PLUGIN / "pagefleet_test_processors-1.0.dist-info", other)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-processors\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[pagefleet.logits_processors]\nonly = other\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"only is in several packages \(other-processors, pagefleet-test"):
        load(folder, "only")


def test_nothing_is_loaded_that_nobody_names(folder: Path) -> None:
    code = f"""
import json, sys
sys.path.insert(0, {str(PLUGIN)!r})
from pagefleet_engine import LLM
with LLM({str(folder)!r}, load_format="dummy", dtype="float32", num_kv_blocks=8, device="cpu", num_threads=1) as llm:
    print(json.dumps([name for name in sys.modules if "test_processors" in name]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_output_of_another_engine_counts(llm: LLM, plain: LLM) -> None:
    """`only` looks at the length of the output: what another engine has made is part of it."""
    prompt = llm.llm_engine.read_prompt("one")[1]
    whole = tokens(plain, ["one"], params())[0]
    for known in (1, 3, 5, 9):
        sampling = SamplingParams(**GREEDY, extra_args={"only_token": 7, "only_from": 5})
        expected = whole[:5] + [7] * 7
        core_of(llm).add(AddRequest(f"r{known}", prompt, sampling, (), resumed_token_ids=expected[:known]))
        rest: list[int] = []
        while core_of(llm).has_work:
            for output in core_of(llm).step():
                rest += output.new_token_ids
        assert rest == expected[known:]


@pytest.mark.parametrize("route", ROUTES)
def test_a_server_passes_arguments_on(route: str) -> None:
    """Streamed and whole, and refused with a true status."""

    async def run() -> None:
        values = {"model": "builtin://tiny", "device": "cpu", "logits_processors": "only,faulty", "num_threads": 1}
        core, _ = build_core(engine_config(values))
        folder = resolve_model_folder("builtin://tiny")
        tokenizer = load_tokenizer(folder)
        async with open_site(core, tokenizer) as site:
            (token,) = tokenizer.encode("the")[:1]
            told = site.fields(route, max_tokens=3, stream=False, vllm_xargs={"only_token": token})
            assert tokenizer.decode([token] * 3) in (await site.send(route, told)).text
            for extra, status, word in (
                ({"other": 1}, 400, "vllm_xargs.other"),
                ({"only_token": "x"}, 400, "only_token takes a token id"),
                ({"fail": "edit"}, 500, "request_failed"),
            ):
                answer = await site.send(route, site.fields(route, vllm_xargs=extra))
                assert (answer.status_code, word in answer.text) == (status, True), answer.text
        core.shutdown()

    asyncio.run(run())
