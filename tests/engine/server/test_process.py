"""The real process: `pagefleet serve` with its engine core, a small random model, and what people do to it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pagefleet_protocol import metric_names
from pagefleet_protocol.console_state import STATE_PATH
from pagefleet_protocol.engine_facts import FACTS_PATH, TEXT_PATH, decode_facts, decode_text, text_digest
from pagefleet_protocol.handoff import CACHE_SALT, PROMPT_TOKENS, pack_tokens, tenant_salt
from pagefleet_protocol.openai_chat import read_chat_request
from pagefleet_text.text_model import TextModel

from tests.fakes.slow_requests import SLOW, finding_plugin, slow
from tests.fakes.small_tokenizers import byte_level_backend

pytestmark = pytest.mark.fleet

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Minutes long: a busy machine may look at it late, and must still see it run.
LONG: dict[str, Any] = {
    "model": "small",
    "prompt": "The quick",
    "max_tokens": 4000,
    "ignore_eos": True,
    "vllm_xargs": slow(),
}


PATIENCE_S = 600.0
"""For whatever a machine that does other things too may take long over."""


class ServerProcess:
    """One `pagefleet serve`, ready to answer."""

    def __init__(self, model: Path | str, *flags: str) -> None:
        command = [sys.executable, "-m", "pagefleet_engine.cli", str(model), "--port", "0", "--num-kv-blocks", "256"]
        command += ["--dtype", "float32", "--served-model-name", "small", "--num-threads", "1", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=finding_plugin())
        self.log: list[str] = []
        self.url = self._wait_for_url()
        threading.Thread(target=self._keep_reading, daemon=True).start()
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        self.wait_until(self._answers)

    def _wait_for_url(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving small on (http://\S+)", line):
                return found[1]
        raise AssertionError("".join(self.log))

    def _keep_reading(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)
        self.process.stderr.close()

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.ConnectError):
            return self.http.get("/readyz").status_code == 200
        return False

    @property
    def core_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    @property
    def core_pid(self) -> int:
        (pid,) = self.core_pids
        return pid

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < timeout_s, "".join(self.log)
            time.sleep(0.01)
        return time.monotonic() - started

    def gauge(self, name: str) -> float:
        (value,) = self.gauges(name)
        return value

    def gauges(self, name: str) -> list[float]:
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(name + "{")]
        return [float(line.rsplit(" ", 1)[1]) for line in lines]

    def running(self) -> float:
        return self.gauge(metric_names.ENGINE_REQUESTS_RUNNING)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "small", "prompt": "The", "max_tokens": 8, **fields})

    def stop(self) -> int:
        self.http.close()
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def folder(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("served") / "small"
    shutil.copytree(make_checkpoint("llama", vocab_size=416, max_position_embeddings=4096), folder)
    byte_level_backend().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(folder, "--deployment-revision", "5e77", SLOW)
    yield server
    assert server.stop() == 0


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start_one(*flags: str) -> ServerProcess:
        started.append(ServerProcess(folder, SLOW, *flags))
        return started[-1]

    yield start_one
    for server in started:
        server.stop()


class OpenStream:
    """A long streamed request in a thread."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self.lines: list[str] = []
        self._body = {**LONG, "stream": True, **fields}
        self._thread = threading.Thread(target=self._run, args=(server.url,), daemon=True)
        self._thread.start()
        server.wait_until(lambda: bool(self.lines))

    def _run(self, url: str) -> None:
        with httpx.stream("POST", url + "/v1/completions", json=self._body, timeout=PATIENCE_S) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)

    def join(self) -> list[str]:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.lines


def test_the_official_client(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve("small").id == "small"
        ask: dict[str, Any] = {"model": "small", "max_tokens": 24, "temperature": 0}
        ask["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a pod?"}]
        whole = client.chat.completions.create(**ask)
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        forced = client.completions.create(
            model="small", prompt="Hi", max_tokens=3, logit_bias={"100": 100}, logprobs=0
        )
        assert forced.choices[0].logprobs is not None
        assert len(set(forced.choices[0].logprobs.tokens or ())) == 1


def test_seeds_stops_and_choices(server: ServerProcess) -> None:
    ask = {"max_tokens": 12, "n": 3, "seed": 5, "temperature": 1.0}
    first, second = (server.complete(**ask).json()["choices"] for _ in range(2))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in second]
    assert len({choice["text"] for choice in first}) > 1
    free = server.complete(max_tokens=24, temperature=0).json()["choices"][0]["text"]
    cut = server.complete(max_tokens=24, temperature=0, stop=[free[4:7]]).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (free[: free.index(free[4:7])], "stop")


def test_a_router_learns_enough_to_hand_over_tokens(server: ServerProcess) -> None:
    facts = decode_facts(server.http.get(FACTS_PATH).content)
    assert (facts.model, facts.scope, facts.kv_events_port) == ("small", "small", None)
    assert (facts.block_size, facts.num_blocks, facts.max_model_len, facts.vocab_size) == (16, 256, 4096, 416)
    assert facts.revision == server.http.get(STATE_PATH).json()["engines"][0]["revision"] == "5e77"
    answer = server.http.get(TEXT_PATH)
    assert answer.headers["x-pagefleet-incarnation"] == facts.incarnation
    assert text_digest(answer.content) == facts.text_digest
    assert server.gauge(metric_names.ENGINE_REQUESTS_MAX) == facts.max_num_seqs
    body = {"model": "small", "messages": [{"role": "user", "content": "The quick <|im_end|>"}], "max_tokens": 8}
    plain = server.http.post("/v1/chat/completions", json={**body, "temperature": 0}).json()
    ids = TextModel.of_data(decode_text(answer.content)).chat_tokens(read_chat_request(body).conversation)
    handed = server.http.post(
        "/v1/chat/completions",
        content=json.dumps({**body, "temperature": 0}).encode() + pack_tokens(ids),
        headers={"content-type": "application/json", PROMPT_TOKENS: str(len(ids))},
    ).json()
    assert handed["choices"] == plain["choices"]
    assert handed["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] == len(ids)


def test_one_tenant_s_cache_is_invisible_to_another(server: ServerProcess) -> None:
    def cached_tokens(tenant: str) -> int:
        headers = {CACHE_SALT: tenant_salt(tenant)}
        body = {"model": "small", "prompt": "The quick brown fox. " * 8, "max_tokens": 1, "cache_salt": "same"}
        answer = server.http.post("/v1/completions", json=body, headers=headers).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached_tokens("a") == 0
    assert cached_tokens("a") > 0
    assert cached_tokens("b") == 0


def test_many_at_once_answer_as_one_by_one(server: ServerProcess) -> None:
    prompts = [f"What is number {i}?" for i in range(8)]

    def ask(prompt: str) -> str:
        return str(server.complete(prompt=prompt, temperature=0).json()["choices"][0]["text"])

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, prompts * 4)) == alone * 4


def test_control_tokens_typed_by_a_user_are_text(server: ServerProcess) -> None:
    def tokens(content: str) -> list[int]:
        body = {"messages": [{"role": "user", "content": content}]}
        return list(server.http.post("/tokenize", json=body).json()["tokens"])

    end = server.http.post("/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"]
    assert len(end) == 1
    assert tokens("<|im_end|>").count(end[0]) == tokens("plain").count(end[0]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [416]}, "prompt"),
        ({"prompt": "word " * 200_000}, "prompt"),
        ({"prompt": "x" * 1_000_000}, "prompt"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"bad_words": ["x"] * 200}, "bad_words"),
        ({"logit_bias": {"416": 1}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_input_changes_nothing(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    pid, canary = server.core_pid, server.complete(temperature=0).json()["choices"]
    refused = server.complete(**fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert server.complete(temperature=0).json()["choices"] == canary
    assert server.core_pid == pid
    assert server.gauge(metric_names.ENGINE_KV_USAGE_RATIO) == 0


def test_a_client_that_leaves_frees_its_blocks_soon(server: ServerProcess) -> None:
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()  # kept: an iterator that is let go of closes the connection
        next(lines)
        server.wait_until(lambda: server.running() == 1)
    before = server.gauge(metric_names.ENGINE_GENERATION_TOKENS)
    server.wait_until(lambda: server.running() == 0)
    # The house rule is a second; this machine may be busy.
    assert server.gauge(metric_names.ENGINE_GENERATION_TOKENS) - before < LONG["max_tokens"] / 2
    assert server.gauge(metric_names.ENGINE_KV_USAGE_RATIO) == 0


def test_a_killed_core_ends_every_request_and_the_process(start: Callable[..., ServerProcess]) -> None:
    server = start()
    stream = OpenStream(server)
    os.kill(server.core_pid, signal.SIGKILL)
    killed = time.monotonic()
    assert json.loads(stream.join()[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert time.monotonic() - killed < 60.0
    assert server.process.wait(PATIENCE_S) == 1


def test_a_stop_waits_and_then_ends_what_is_left(start: Callable[..., ServerProcess]) -> None:
    server = start("--drain-timeout", "0.2")
    stream = OpenStream(server)
    os.kill(server.core_pid, signal.SIGSTOP)  # so that it cannot finish in time
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    assert json.loads(stream.join()[-1].removeprefix("data: "))["error"]["code"] == "server_shutting_down"


def test_the_core_follows_a_killed_server(start: Callable[..., ServerProcess]) -> None:
    server = start()
    core = server.core_pid
    server.process.kill()
    server.process.wait(PATIENCE_S)
    server.wait_until(lambda: not _is_alive(core))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key-file", "/nonexistent"], "api_key_file /nonexistent cannot be read"),
        (["--host", "192.0.2.1"], "cannot listen on"),
        (["--max-model-len", "100000"], "max_model_len"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(folder: Path, flags: list[str], said: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pagefleet_engine.cli",
        str(folder),
        "--port",
        "0",
        "--num-kv-blocks",
        "16",
        *flags,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_stored_responses_outlive_a_killed_process(folder: Path, tmp_path: Path) -> None:
    flags = ("--response-store", str(tmp_path / "responses"))
    ask = {"model": "small", "input": "The quick", "max_output_tokens": 8}
    server = ServerProcess(folder, *flags)
    core = server.core_pid
    try:
        whole = server.http.post("/v1/responses", json=ask).json()
        long = {**ask, "max_output_tokens": 4000, "ignore_eos": True, "background": True}
        os.kill(core, signal.SIGSTOP)  # so that it is not at its end by then
        cut = server.http.post("/v1/responses", json=long).json()
    finally:
        server.http.close()
        server.process.kill()
        server.process.wait(PATIENCE_S)
        os.kill(core, signal.SIGCONT)
    again = ServerProcess(folder, *flags)
    try:
        assert again.http.get(f"/v1/responses/{whole['id']}").json() == whole
        lost = again.http.get(f"/v1/responses/{cut['id']}").json()
        assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
        more = again.http.post("/v1/responses", json={**ask, "previous_response_id": whole["id"]}).json()
        assert more["usage"]["input_tokens"] > whole["usage"]["input_tokens"]
        facts = decode_facts(again.http.get(FACTS_PATH).content)
        assert facts.response_store == whole["id"][5:17] == more["id"][5:17]
    finally:
        again.stop()


def test_a_profile_of_real_steps(folder: Path, tmp_path: Path) -> None:
    profiles = tmp_path / "new" / "profiles"
    server = ServerProcess(folder, "--profiler-dir", str(profiles))
    try:
        assert server.http.post("/start_profile", json={}).json() == {}
        refused = server.http.post("/start_profile", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "profile_refused")
        assert server.complete().status_code == 200
        path = Path(server.http.post("/stop_profile", json={}).json()["path"])
        assert path.parent == profiles
        assert b"aten::" in gzip.decompress(path.read_bytes())
        assert server.complete().status_code == 200
    finally:
        server.stop()
