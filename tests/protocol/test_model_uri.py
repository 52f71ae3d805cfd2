"""What a person means who names a model."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pagefleet_protocol.model_uri import PATTERN, model_named, parse_model_uri
from pagefleet_protocol.resource_documents import parse_inference_service
from pydantic_core import PydanticCustomError

from tests.fakes.resource_documents import service_document


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B"),
        ("/models/a b%", "file:///models/a%20b%25"),
        ("/models/../x/", "file:///x"),
        ("s3://bucket/path", "s3://bucket/path"),
        ("builtin://tiny", "builtin://tiny"),
        ("org/name:Q4_K_M", "hf://org/name:Q4_K_M"),
        ("org/name/in/file.gguf", "hf://org/name/in/file.gguf"),
    ],
)
def test_names_paths_and_uris(text: str, uri: str) -> None:
    assert model_named(text, lambda _: False).text == uri


@pytest.mark.parametrize("text", ["./org/name", "../org/name", ".", "~/models/x"])
def test_what_begins_as_a_path_is_one(text: str) -> None:
    found = model_named(text, lambda _: False)
    assert found.scheme == "file"
    assert found.local_path == os.path.abspath(Path(text).expanduser())


def test_what_exists_is_a_path_before_it_is_a_name() -> None:
    assert model_named("org/name", {"org/name"}.__contains__).local_path == os.path.abspath("org/name")
    assert model_named("folder", lambda _: True).local_path == os.path.abspath("folder")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "org/..",
        "org/../x",
        "org/name/more",
        "org name/x",
        "-org/x",
        "org/name@v1",
        "org/name:",
        "a/b:Q4/c.gguf",
        "org/name/../x.gguf",
        "a/b/.gguf",
    ],
)
def test_what_is_none_of_them_says_what_to_write(text: str) -> None:
    with pytest.raises(PydanticCustomError, match="no such folder, and no name of a model: give a folder, or one of "):
        model_named(text, lambda _: False)


def test_a_service_takes_a_name_of_the_hub_with_all_that_goes_with_it() -> None:
    model = {
        "uri": "Qwen/Qwen3-8B",
        "revision": "v1",
        "endpoint": "https://mirror.example",
        "secretRef": {"name": "hf"},
    }
    service = parse_inference_service(service_document(model=model, cache={"type": "pvc", "claim": "models"}))
    assert service.spec.model.uri == "hf://Qwen/Qwen3-8B"
    for uri in ("Qwen/Qwen3-8B", "hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B:Q8_0", "hf://Qwen/Qwen3-8B/x-Q8_0.gguf"):
        assert re.fullmatch(PATTERN[1:-1], uri)
    for uri in ("Qwen", "./Qwen/x", "a/b/c", "/a/b"):
        assert not re.fullmatch(PATTERN[1:-1], uri)


@pytest.mark.parametrize(
    ("uri", "is_page"),
    [
        ("https://hf.co/org/name", True),
        ("http://www.huggingface.co", True),
        ("https://huggingface.co:443/org/name", True),
        ("https://hf.corp.example/models/qwen", False),
        ("https://huggingface.contoso.example/models/qwen", False),
    ],
)
def test_a_page_of_the_hub_is_no_folder_of_files(uri: str, is_page: bool) -> None:
    if not is_page:
        assert parse_model_uri(uri).scheme == "https"
        return
    with pytest.raises(PydanticCustomError, match="which is the model's name on the hub"):
        parse_model_uri(uri)


@pytest.mark.parametrize("uri", ["s3://b/path", "gs://ab/path"])
def test_too_short_a_name_of_a_bucket_is_told_as_such(uri: str) -> None:
    with pytest.raises(
        PydanticCustomError, match=f"{uri[:5]}bucket/path, a bucket's name having at least 3 letters, not"
    ):
        parse_model_uri(uri)
    assert parse_model_uri(uri.replace("b/", "bcd/")).fetchable


@pytest.mark.parametrize(
    ("uri", "gguf"),
    [
        ("hf://org/name", None),
        ("modelscope://org/name:Q4_K_M", "Q4_K_M"),
        ("hf://org/name/x.gguf", "x.gguf"),
        ("hf://org/name/in/x.gguf", "in/x.gguf"),
        ("s3://bucket/x.gguf", None),
    ],
)
def test_a_file_of_a_repository(uri: str, gguf: str | None) -> None:
    found = parse_model_uri(uri)
    assert found.gguf == gguf
    assert not found.has_revisions or found.repository == "org/name"


def test_a_service_takes_one_with_a_revision_and_a_secret() -> None:
    model = {"uri": "org/name:Q4_K_M", "revision": "v1", "secretRef": {"name": "hf"}}
    service = parse_inference_service(service_document(model=model, cache={"type": "pvc", "claim": "models"}))
    assert service.spec.model.uri == "hf://org/name:Q4_K_M"
