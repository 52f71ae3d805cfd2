"""Which files of a model are wanted. Pure. Nothing that can hold code is on the list: no *.py, no pickled weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from pagefleet_protocol.model_config.gguf_header import first_part, is_beside_a_model, parts_named

from pagefleet_download.errors import BadModel

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 32 << 20
MAYBE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What may lie beside the weights, where a store cannot be asked what there is."""
_WEIGHTS = ".safetensors"
_BESIDE_WEIGHTS = (".json", ".model", ".txt", ".jinja")
"""Configurations, tokenizers, merges and vocabularies, chat templates."""
_GGUF = ".gguf"
_TYPE = re.compile(r"I?Q\d|TQ\d|BF\d|F\d|MXFP", re.IGNORECASE)
"""As names of types begin."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_FILES = 4096
_MAX_NAME_BYTES = 200  # a part's name is longer, and file systems end at 255


def top_names(names: Iterable[str]) -> list[str]:
    """The names directly in the model's folder; those further down are of other formats, and of no use to an engine.

    Raises:
        BadModel: a name could lead out of the folder, or is there twice; then nothing of this listing is to be trusted.
    """
    top: list[str] = []
    seen: set[str] = set()
    for name in names:
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
            raise BadModel(f"the store lists a file named {name[:80]!a}, which could lead out of the folder: refused")
        if name in seen:
            raise BadModel(f"the store lists {name[:80]!a} twice: refused")
        seen.add(name)
        if name == path.name and not name.startswith("."):
            top.append(name)
    return top


def companions(names: Iterable[str]) -> list[str]:
    """What is wanted beside the weights.

    Raises:
        BadModel: there are too many, or a name is too long.
    """
    wanted = [name for name in names if name.endswith(_BESIDE_WEIGHTS)]
    check_amount(wanted)
    return wanted


def choose_weights(names: Iterable[str], index: Mapping[str, Any] | None) -> list[str]:
    """The files that the engine will read: those that `index` names, or else the single one, or else all there are.

    Raises:
        BadModel: there are none, or some are missing.
    """
    there = set(names)
    if index is not None:
        named = indexed(index)
        if missing := [name for name in named if name not in there]:
            raise BadModel(f"the model lacks {name_some(missing)}, named in {INDEX}: add the missing shards")
        return named
    if SINGLE in there:
        return [SINGLE]
    loose = sorted(name for name in there if name.endswith(_WEIGHTS))
    if any("-of-" in name for name in loose):
        raise BadModel(f"{INDEX} is missing beside sharded weights: add it to the model")
    if not loose:
        raise BadModel(_no_weights(there))
    check_amount(loose)
    return loose


def choose_gguf(names: Iterable[str], wanted: str | None) -> list[str]:
    """The files of one model in GGUF, its parts in order.

    Args:
        names: all that there are, in folders too.
        wanted: the name of one of them, or a type as in `Q4_K_M`; None: the only model.

    Raises:
        BadModel: there is no such file, or several are meant, or parts are missing.
    """
    there = {name for name in names if name.endswith(_GGUF)}
    if not there:
        raise BadModel("the repository has no file in GGUF: give it as organization/name, or one that has")
    if wanted is None or not wanted.endswith(_GGUF):
        models = sorted({first_part(name) for name in there if not is_beside_a_model(name)})
        if wanted is not None:
            before = "[-._]" if _TYPE.match(wanted) else "[-.]"
            of_type = re.compile(rf"(.*{before})?{re.escape(wanted)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
            models = [name for name in models if of_type.fullmatch(PurePosixPath(name).name)]
        if len(models) != 1:
            shown = name_some(models or sorted(there)) or "none"
            of = f" of type {wanted}" if wanted is not None else ""
            raise BadModel(
                f"the repository has {len(models)} models in GGUF{of} ({shown}): name one, as in "
                "organization/name:Q4_K_M or organization/name/FILE.gguf"
            )
        (wanted,) = models
    parts = _parts(wanted)
    check_amount(parts)
    if missing := [name for name in parts if name not in there]:
        raise BadModel(f"the model lacks {name_some(missing)}: check the name, or add the missing parts")
    return parts


def _parts(name: str) -> list[str]:
    path = PurePosixPath(name)
    return [str(path.with_name(part)) for part in parts_named(path.name) or [path.name]]


def check_config(names: Iterable[str]) -> None:
    """Refuse a model without configuration, for what is wrong with it first of all."""
    there = set(names)
    if CONFIG in there:
        return
    if not any(name.endswith(_WEIGHTS) for name in there):
        raise BadModel(_no_weights(there))
    raise BadModel(f"the model has no {CONFIG}: give a model in Hugging Face layout")


def check_tokenizer(names: Iterable[str]) -> None:
    """Refuse what has no tokenizer, where nothing else is wanted."""
    if not {"tokenizer.json", "tokenizer.model"} & set(names):
        raise BadModel("there is no tokenizer.json and no tokenizer.model: name a repository or folder that has one")


def is_weights(name: str) -> bool:
    """Whether an engine might load tensors because this file is in its folder."""
    return name.endswith((_WEIGHTS, _GGUF)) or name == INDEX


def is_gguf(names: Iterable[str]) -> bool:
    """Whether a model with these files is one in GGUF: it has no other weights that are taken."""
    return any(name.endswith(_GGUF) for name in names) and not any(name.endswith(_WEIGHTS) for name in names)


def check_amount(names: list[str]) -> None:
    """Refuse more files than any model has, and names that a file system cannot keep."""
    if len(names) > _MAX_FILES:
        raise BadModel(f"the model has {len(names)} files, and {_MAX_FILES} are allowed: is this the right folder?")
    for name in names:
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise BadModel(f"the name of {name[:60]!a}... is over {_MAX_NAME_BYTES} bytes long: rename the file")


def name_some(names: list[str]) -> str:
    """Up to three names, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def indexed(index: Mapping[str, Any]) -> list[str]:
    """The files of weights that an index names.

    Raises:
        BadModel: it names none, or what can be none.
    """
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise BadModel(f"{INDEX} has no weight_map of tensor names to file names: repair the file")
    named = sorted(set(places.values()))
    strange = [name for name in named if not name.endswith(_WEIGHTS) or name != PurePosixPath(name).name]
    if strange:
        shown = name_some([ascii(name[:80]) for name in strange])
        raise BadModel(f"{INDEX} names {shown}: weights must be *{_WEIGHTS} files that lie beside it")
    check_amount(named)
    return named


def _no_weights(there: set[str]) -> str:
    if pickled := sorted(name for name in there if name.endswith(_PICKLED)):
        return (
            f"the model has weights only as {name_some(pickled)}, and loading pickled files can run code: choose a "
            "repository or revision with *.safetensors, or convert them (transformers: model.save_pretrained)"
        )
    return "the model has no *.safetensors file: give the folder that has the weights"
