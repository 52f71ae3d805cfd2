"""docs/coming-from-vllm.md shows the table of vLLM's options as it is: run this file to write it anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.settings import SERVE, vllm_options
from pagefleet_protocol.settings.foreign import ForeignOption

VALUES = {
    "dtype": "half",
    "quantization": "fp8",
    "load_format": "dummy",
    "kv_cache_dtype": "fp8_e4m3",
    "attention_backend": "FLASH_ATTN",
    "scheduling_policy": "priority",
    "guided_decoding_backend": "xgrammar",
    "device": "cpu",
    "distributed_executor_backend": "ray",
    "data_parallel_backend": "ray",
    "all2all_backend": "all2allv",
    "gpu_memory_utilization": "0.5",
    "hf_overrides": '{"rope_theta": 1e6}',
}
"""What options take that do not take any word or number."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "coming-from-vllm.md"
TABLE = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end of options -->)", re.DOTALL)


def kind(name: str, option: ForeignOption) -> str:
    if option.means or option.cases:
        return "alias"
    if name in SERVE.settings:
        return "same"
    return "neutral" if option.neutral == "any" else "not here"


def row(name: str, option: ForeignOption) -> str:
    flags = [f"`--{name.replace('_', '-')}`", *(f"`{flag}`" for flag in option.flags)]
    what = kind(name, option)
    if what == "not here" and option.neutral:
        values = ("no " if option.takes == "switch" and option.neutral == ("false",) else "") or " ".join(
            f"`{value}`" for value in option.neutral if value.strip("[]{}")
        )
        what = "not here" if not values or values == "no " else f"{values} neutral, else not here"
    meant = f"`--{option.means.replace('_', '-')}`" if option.means else ""
    remark = ": ".join(text for text in (meant, option.remark) if text)
    return f"| {', '.join(flags)} | {what} | {'no more' if option.gone else '0.32'} | {remark} |\n"


def table() -> str:
    head = "| vLLM's flag | here | in vLLM | |\n|---|---|---|---|\n"
    return head + "".join(row(name, option) for name, option in vllm_options().items())


def test_the_document_shows_the_table() -> None:
    shown = TABLE.search(DOCUMENT.read_text())
    assert shown is not None
    assert shown[0] == table(), "run python -m tests.architecture.test_coming_from_vllm"


def test_the_most_used_options_are_all_said() -> None:
    kinds = [kind(name, option) for name, option in vllm_options().items()]
    assert len(kinds) >= 120
    assert min(kinds.count(one) for one in ("same", "alias", "neutral", "not here")) >= 10


def test_whoever_is_refused_is_told_what_to_do() -> None:
    silent = [
        name
        for name, option in vllm_options().items()
        if kind(name, option) in ("not here", "neutral") and not option.remark
    ]
    assert not silent


def read(name: str, option: ForeignOption, value: str, spelling: str = "") -> dict[str, Any]:
    flag = spelling or f"--{name.replace('_', '-')}"
    if option.takes != "switch":
        return SERVE.read(["m", flag, value], {})
    return SERVE.read(["m", flag if value == "true" else f"--no-{flag.removeprefix('--')}"], {})


OPTIONS = [(name, option) for name, option in vllm_options().items() if name != "model"]


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=[name for name, _ in OPTIONS])
def test_a_flag_does_what_the_table_says(name: str, option: ForeignOption, capsys: pytest.CaptureFixture[str]) -> None:
    for value in (VALUES.get(name, "true"),) if option.neutral == "any" else option.neutral:
        assert read(name, option, value) == {"model": "m"}
        assert f"nothing changes by --{name.replace('_', '-')}: ignored" in capsys.readouterr().err
    if option.neutral == "any":
        return
    if kind(name, option) == "not here":
        for spelling in ("", *option.flags):
            with pytest.raises(ConfigError) as refused:
                read(name, option, "false" if "true" in option.neutral else "true", spelling)
            assert str(refused.value).endswith(f": {option.remark}")
        return
    value = VALUES.get(name, "true" if option.takes == "switch" else "4")
    for spelling in ("", *option.flags):
        given = read(name, option, value, spelling)
        assert (given.keys() - {"model"}) == ({option.means or name} if not option.cases else {*option.cases[value]})
    assert capsys.readouterr().err == ""


def test_what_an_option_means_is_a_setting_that_takes_it() -> None:
    for name, option in vllm_options().items():
        meant = [{option.means: None}] if option.means else option.cases.values()
        for settings in meant:
            for setting, value in settings.items():
                assert setting in SERVE.settings, name
                if value is not None:
                    SERVE.settings[setting].parse(value, name)


def test_flags_are_spelled_once() -> None:
    flags = [flag for option in vllm_options().values() for flag in option.flags]
    assert len(flags) == len(set(flags))
    SERVE.parser()


if __name__ == "__main__":
    DOCUMENT.write_text(TABLE.sub(lambda _: table(), DOCUMENT.read_text()))
