"""A model's tokenizer and chat template, from the metadata of its GGUF file, as the files that Hugging Face has.

Two families: byte-level BPE with the file's merges (`gpt2`), and SentencePiece's BPE (`llama`), whose merges follow
from the tokens' scores. How text is cut before BPE has a name in the file (see word_cuts).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.file import GgufModel
from pagefleet_engine.gguf.word_cuts import cuts_of

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""Begin a text with a token unless the file says otherwise, and take whole words of the vocabulary as they are."""
_ENDS_OF_TURNS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
_SPACE = "▁"
_LONGEST_JOINED = 512
"""Characters: trying all cuts of a token takes their square."""
_log = logging.getLogger(__name__)


def tokenizer_files(model: GgufModel) -> dict[str, str]:
    """The contents of tokenizer.json, tokenizer_config.json and generation_config.json; none where the file has no
    tokenizer.

    Raises:
        ModelLoadError: it has one that is not run, or that cannot be.
    """
    metadata = model.metadata
    if metadata.get("tokenizer.ggml.model", "none") == "none":
        return {}
    said = _Said(model)
    kind = metadata["tokenizer.ggml.model"]
    match kind:
        case "gpt2":
            if "tokenizer.ggml.pre" not in metadata:
                _log.warning("%s does not say how words are cut: it is done as for GPT-2", model.files[0])
            backend = _byte_level(said)
        case "llama":
            backend = _sentencepiece(said)
        case _:
            raise said.refusal(f"its tokenizer is of the kind {str(kind)[:40]!a}, and gpt2 and llama are run")
    for special, kinds in ((True, (_CONTROL,)), (False, (_USER_DEFINED,))):
        added = [token for token, one in zip(said.tokens, said.types, strict=True) if one in kinds and token]
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    ends = [said.id("eos"), said.id("eot"), said.id("eom")]
    named = [said.ids[token] for token in _ENDS_OF_TURNS if token in said.ids]
    ends += [token_id for token_id in named if said.types[token_id] == _CONTROL]
    return {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps(_settings(said, with_bos=kind == "llama" or said.pre in _WITH_BOS)),
        "generation_config.json": json.dumps({"eos_token_id": list(dict.fromkeys(e for e in ends if e is not None))}),
    }


class _Said:
    """What the metadata say of a tokenizer, checked."""

    def __init__(self, model: GgufModel) -> None:
        """Raises ModelLoadError when lists are missing, or not as long as each other."""
        self._source, self._metadata = model.files[0], model.metadata
        self.tokens = self._texts("tokens")
        types = self._metadata.get("tokenizer.ggml.token_type")
        if types is None:
            types = memoryview(bytes([_NORMAL]) * len(self.tokens))
        if not isinstance(types, memoryview) or len(types) != len(self.tokens) or not self.tokens:
            raise self.refusal(f"it has {len(self.tokens)} tokens, and no list of as many types")
        self.types: list[int] = types.tolist()
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise self.refusal("a token is there twice")
        pre = self._metadata.get("tokenizer.ggml.pre", "default")
        self.pre = pre if isinstance(pre, str) else "default"

    def refusal(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._source}: {what}: name another tokenizer with --tokenizer")

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self._texts("merges")]
        for pair in pairs:
            if len(pair) != 2 or any(part not in self.ids for part in (*pair, "".join(pair))):
                raise self.refusal(f"the merge {' '.join(pair)[:40]!a} is not of its tokens")
        return [(pair[0], pair[1]) for pair in pairs]

    def scores(self) -> Sequence[float]:
        scores = self._metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, memoryview) or len(scores) != len(self.tokens):
            raise self.refusal("its tokens have no scores")
        return cast("list[float]", scores.tolist())

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        return value if isinstance(value, bool) else default

    def id(self, name: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def template(self) -> str | None:
        value = self._metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def _texts(self, name: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list):
            raise self.refusal(f"its tokenizer has no list of {name}")
        return value


def _settings(said: _Said, *, with_bos: bool) -> Mapping[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found: dict[str, Any] = {
        name: said.tokens[number] for name, ours in names.items() if (number := said.id(ours)) is not None
    }
    found["add_bos_token"] = said.flag("add_bos_token", with_bos)
    if (template := said.template()) is not None:
        found["chat_template"] = template
    return found


def _byte_level(said: _Said) -> Tokenizer:
    backend = Tokenizer(models.BPE(said.ids, said.merges(), ignore_merges=said.pre in _WITH_BOS))
    cuts = cuts_of(said.pre)
    if cuts is None:
        raise said.refusal(f"how its tokenizer cuts text ({said.pre[:40]!a}) is not known")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(said: _Said) -> Tokenizer:
    unknown = said.id("unknown")
    backend = Tokenizer(
        models.BPE(
            said.ids,
            _merges_of(said),
            unk_token=None if unknown is None else said.tokens[unknown],
            fuse_unk=True,
            byte_fallback="<0x00>" in said.ids,
        )
    )
    before = said.flag("add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if before else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if before else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return backend


def _merges_of(said: _Said) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token of text, best score first: so SentencePiece joins them."""
    ids, found = said.ids, []
    for token, score, kind in zip(said.tokens, said.scores(), said.types, strict=True):
        if kind != _NORMAL or len(token) > _LONGEST_JOINED:
            continue
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        inner = [(left, right) for left, right in parts if left in ids and right in ids]
        inner.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, *pair) for pair in inner]
    found.sort(key=lambda one: one[0], reverse=True)
    return [(left, right) for _, left, right in found]
