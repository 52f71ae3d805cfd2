import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pagefleet_engine.cli import main, read_configuration
from pagefleet_engine.config import (
    CacheConfig,
    EngineConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.settings import engine_config
from pagefleet_kv.config import KvEventsConfig


def test_no_options_give_the_defaults() -> None:
    assert read_configuration(["/m"], {}) == (EngineConfig(model=ModelConfig(model="/m")), ServerConfig())


def test_flags_of_every_type() -> None:
    flags = (
        "/m --max-model-len 64 --dtype bfloat16 --gpu-memory-utilization 0.5 --no-enable-prefix-caching "
        "--kv-cache-memory 1.5G --policy priority --port 0 --access-log --max-body-bytes 64K"
    )
    engine, server = read_configuration(flags.split(), {})
    assert engine == EngineConfig(
        model=ModelConfig(model="/m", max_model_len=64, dtype="bfloat16"),
        cache=CacheConfig(gpu_memory_utilization=0.5, enable_prefix_caching=False, kv_cache_memory=3 * 2**29),
        scheduler=SchedulerConfig(policy="priority"),
    )
    assert server == ServerConfig(port=0, access_log=True, max_body_bytes=65536)


def test_a_command_of_vllm_serve() -> None:
    flags = (
        "--model /m --tensor-parallel-size 1 --max_model_len 64 --gpu-memory-utilization 0.5 --trust-remote-code "
        "--scheduling-policy priority --kv-cache-memory-bytes 1G --num-gpu-blocks-override 9 --enable-auto-tool-choice "
        "--tool-call-parser hermes --shutdown-timeout 5 -O3 --kv-cache-dtype fp8_e4m3 --attention-backend FLASH_ATTN "
        "--disable-uvicorn-access-log --served-model-name one two --api-key k1 k2 "
        '--allowed-origins ["https://a.example","https://b.example"]'
    )
    engine, server = read_configuration(flags.split(), {})
    assert engine == EngineConfig(
        model=ModelConfig(model="/m", max_model_len=64, served_model_name="one,two"),
        cache=CacheConfig(gpu_memory_utilization=0.5, kv_cache_memory=2**30, num_kv_blocks=9, kv_cache_dtype="fp8"),
        scheduler=SchedulerConfig(policy="priority"),
        execution=ExecutionConfig(attention_backend="flash"),
    )
    origins = ("https://a.example", "https://b.example")
    assert server == ServerConfig(
        drain_timeout=5, tool_call_parser="hermes", api_key=("k1", "k2"), cors_origins=origins
    )
    assert "k1" not in repr(server)


def test_keys_in_a_command_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    read_configuration(["/m", "--api-key", "k"], {})
    assert capsys.readouterr().err == (
        "pagefleet serve: --api-key can be read in the list of processes: prefer --api-key-file\n"
    )
    read_configuration(["/m"], {"PAGEFLEET_ENGINE_API_KEY": "k"})
    assert capsys.readouterr().err == ""


def test_a_flag_beats_the_environment_and_that_the_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: /file\nblock-size: 8\nmax_num_seqs: 3\nport: 1\nenable_prefix_caching: false\nseed: 4\n")
    environment = {"PAGEFLEET_ENGINE_MAX_NUM_SEQS": "5", "PAGEFLEET_ENGINE_PORT": "2", "HOME": "/"}
    engine, server = read_configuration(["--config", str(file), "--port", "3"], environment)
    assert (engine.model.model, engine.cache.block_size, engine.model.seed) == ("/file", 8, 4)
    assert (engine.scheduler.max_num_seqs, server.port) == (5, 3)
    assert not engine.cache.enable_prefix_caching


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        ("", None),
        ("--fleet-key-file /key --kv-events-host ::", None),
        ("--kv-events-port 5557", KvEventsConfig("127.0.0.1", 5557, None)),
        ("--kv-events-port 5557 --host ::1", KvEventsConfig("::1", 5557, None)),
        ("--kv-events-port 5557 --kv-events-host localhost --host ::", KvEventsConfig("localhost", 5557, None)),
        ("--kv-events-port 1 --host :: --fleet-key-file /key", KvEventsConfig("::", 1, "/key")),
        (
            "--kv-events-port 65534 --kv-events-host 10.0.0.1 --fleet-key-file /key",
            KvEventsConfig("10.0.0.1", 65534, "/key"),
        ),
    ],
)
def test_where_kv_events_are_published(flags: str, place: KvEventsConfig | None) -> None:
    assert read_configuration(["/m", *flags.split()], {})[1].kv_events == place


def test_variables_that_kubernetes_adds_for_a_service_are_not_ours() -> None:
    environment = {"PAGEFLEET_ENGINE_PORT": "tcp://10.0.0.7:80", "PAGEFLEET_ENGINE_SERVICE_HOST": "10.0.0.7"}
    assert read_configuration(["/m"], environment)[1] == ServerConfig()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no model is given"),
        (["/m", "--block-size", "x"], "--block-size is 'x': give a whole number"),
        (["/m", "--block-size", "0"], "--block-size is 0: give at least 1"),
        (["/m", "--access-log=ja"], "--access-log is 'ja': give true or false"),
        (["/m", "--dtype", "int4"], "--dtype is 'int4': give one of auto, float32"),
        (["/m", "--kv-cache-memory", "much"], "give bytes, or a size such as 512M"),
        (["/m", "--gpu-memory-utilization", "2"], "give more than 0, at most 1"),
        (["/m", "--port", "70000"], "--port is 70000"),
        (
            ["/m", "--kv-events-port", "65535"],
            "is 65535: give 0 to 65534, as the next port is taken too",
        ),
        (["/m", "--kv-events-port", "-1"], "--kv-events-port is -1: give 0 to 65534"),
        (["/m", "--kv-events-port", "8000"], "takes ports 8000 and 8001, and port is one of them"),
        (["/m", "--kv-events-port", "7999"], "takes ports 7999 and 8000, and port is one of them"),
        (["/m", "--kv-events-port", "5557", "--host", "0.0.0.0"], "KV events on 0.0.0.0 could be read by others: give"),
        (["/m", "--kv-events-port", "5557", "--kv-events-host", "gpu-3"], "KV events on gpu-3 could be read by others"),
        (["/m", "--kv-events-port", "5557", "--no-enable-prefix-caching"], "prefix caching is off: leave one"),
        (["/m", "--profiler-dir", "/p", "--data-parallel-size", "2"], "profiler_dir is of one copy of the model"),
        (["/m", "--max-num-seqs", "100", "--max-num-batched-tokens", "10"], "raise the first or lower the second"),
        (["/m", "--config", "/no/such.yaml"], "cannot be read"),
        (["/m", "--max-model-length", "5"], "'--max-model-length'; did you mean --max-model-len? (see pagefleet serve"),
        (["/m", "/n"], "unknown argument '/n'"),
        (["/m", "--enable-lora"], "--enable-lora is not supported: adapters are not served, merge them"),
        (["/m", "--api-key-file", "/k", "--api-key", "k"], "both given: write all keys into the file"),
        (["/m", "--port"], "argument --port: expected one argument (see pagefleet serve --help)"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {})
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("pagefleet serve: error: ")
    assert says in error
    assert error.count("\n") == 1


def test_a_model_that_cannot_be_loaded_is_status_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path / "absent"), "--port", "0"]) == 3
    assert "no such folder" in capsys.readouterr().err.splitlines()[-1]


def test_an_address_in_use_may_be_free_the_next_time(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["builtin://tiny", "--port", str(taken.getsockname()[1])]) == 1
    assert "Address already in use" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["builtin://tiny"], 0, ""),
        (["organization/name"], 0, ""),
        (["builtin://tny"], 3, "no such built-in model"),
        (["/no/such"], 3, "/no/such: no such folder"),
        (["builtin://tiny", "--tokenizer", "/no/such"], 3, "tokenizer /no/such: no such folder"),
        (["builtin://tiny", "--block-size", "0"], 2, "--block-size is 0: give at least 1"),
        (["builtin://tiny", "--revision", "main"], 2, "no model of the hub"),
    ],
)
def test_a_check_looks_and_loads_nothing(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--check"]) == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max_model_length: 5", "'max_model_length' is not a setting; did you mean max_model_len?"),
        ("- 1", "holds no settings"),
        ("{", "is not YAML"),
        ("block_size: true", "block_size is 'True'"),
        ("access_log: [1]", r"access_log is '\[1\]': give true or false"),
        ("block_size:", "block_size has no value"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        read_configuration(["/m", "--config", str(file)], {})


@pytest.mark.parametrize(
    ("given", "seats", "tokens"),
    [
        ({"max_num_batched_tokens": 64}, 64, 64),
        ({"max_num_seqs": 4096}, 4096, 4096),
        ({"max_num_seqs": 300}, 300, 2048),
        ({"max_num_batched_tokens": 4096}, 256, 4096),
    ],
)
def test_a_default_gives_way_to_what_is_given(given: dict[str, int], seats: int, tokens: int) -> None:
    scheduler = engine_config({"model": "/m", **given}).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (seats, tokens)


@pytest.mark.parametrize(("given", "meant"), [("half", "float16"), ("float", "float32"), ("torch.float16", "float16")])
def test_other_spellings_of_a_dtype(given: str, meant: str) -> None:
    assert engine_config({"model": "/m", "dtype": given}).model.dtype == meant


def test_optional_settings_can_be_unset() -> None:
    assert engine_config({"model": "/m", "max_model_len": None}).model.max_model_len is None
    assert engine_config({"model": "/m", "max_model_len": "none"}).model.max_model_len is None


_LATER = ("torch", "transformers", "aiohttp")
_HEAVY = (*_LATER, "starlette", "zmq", "yaml", "tokenizers")


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import pagefleet_engine", _HEAVY),
        ("from pagefleet_engine.cli import main; main(['--help'])", _HEAVY),
        # It starts the core, which imports torch for itself.
        ("import pagefleet_engine.server.serve", _LATER),
    ],
)
def test_imports_and_help_wait_for_no_heavy_library(code: str, heavy: tuple[str, ...]) -> None:
    check = (
        "import sys, atexit; atexit.register(lambda: print([m for m in HEAVY if m in sys.modules], file=sys.stderr)); "
    )
    script = f"HEAVY = {heavy}; {check}{code}"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert ended.stderr.strip() == "[]"


def test_public_names_are_found_lazily() -> None:
    import pagefleet_engine

    assert {name: hasattr(pagefleet_engine, name) for name in pagefleet_engine.__all__} == dict.fromkeys(
        pagefleet_engine.__all__, True
    )
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = pagefleet_engine.Nothing


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_a_step_beyond_any_device_is_refused_before_buffers_are_made(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 3000000000: give 1 to"):
        engine_config({"model": "/m", name: 3 * 10**9})
