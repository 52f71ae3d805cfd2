"""Which wheels a machine with a GPU is given."""

from __future__ import annotations

from importlib import metadata

from bench.wheels import installed_requirements, requirements, wheels

REQUIRED = {
    "pagefleet-engine": ["pagefleet-text", "fast_api>=1", "torch>=2", "aiohttp; extra == 'bench'"],
    "pagefleet-text": ["tokenizers>=1", "msgspec"],
    "fast-api": ["traces.api>=1", "old; python_version < '3.12'", "winloop; sys_platform == 'win32'"],
    "torch": ["sympy", "triton"],
    "transformers": ["tokenizers", "fast-api; extra == 'serving'"],
}


def test_all_that_is_required_comes_but_what_the_machine_has() -> None:
    found = wheels(lambda name: REQUIRED.get(name, ()), "3.12")
    for_tests = {"hypothesis", "pytest-timeout", "pytest-xdist"}
    assert set(found) == {"fast-api", "msgspec", "traces-api"} | for_tests
    assert set(wheels(lambda name: REQUIRED.get(name, ()), "3.11")) - set(found) == {"old"}


def test_what_the_libraries_of_the_engine_import_is_there() -> None:
    found = wheels(installed_requirements, "3.12")
    assert {"starlette", "msgspec", "pydantic-core"} <= set(found)
    starlette = requirements(lambda name: metadata.requires(name) or (), "3.12", "starlette")
    assert set(starlette) - {"typing-extensions"} <= set(found)
    assert not {"torch", "triton", "transformers", "numpy", "pagefleet-kernels"} & set(found)
