"""How text is cut before byte-level BPE, by the name that a GGUF file has for it. The expressions are those of the
models; of several each cuts what the ones before left.
"""

from __future__ import annotations

from collections.abc import Mapping

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_WORDS
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_WORDS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_AFTER_CASED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}" + _AFTER_CASED
_O200K = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    + _AFTER_CASED
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NO_HAN_UPPER, _NO_HAN_LOWER = (f"[{letters}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|{_WORD}{_NO_HAN_UPPER}*{_NO_HAN_LOWER}+{_CONTRACTIONS}?"
    rf"|{_WORD}{_NO_HAN_UPPER}+{_NO_HAN_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _AFTER_WORDS
)
_DEEPSEEK_CASED = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB6F}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}]]"
)
"""Letters with a case, but for the alphabets that its first tokenizer left out."""
_DEEPSEEK_HAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_MARKS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_DEEPSEEK = (r"[\r\n]", rf"\s?{_DEEPSEEK_CASED}+", _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_HAN, r"\p{N}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_CUTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), (_QWEN2,)),
    "seed-coder": (_SEED,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_O200K,)),
    **dict.fromkeys(("gpt-2", "default", "olmo", "mpt", "jais", "phi-2", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "command-r", "refact", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    "kimi-k2": (_KIMI,),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    "falcon": _FALCON,
    "bloom": (_BLOOM,),
}


def cuts_of(name: str) -> tuple[str, ...] | None:
    """The expressions of what stays together, in order; None: the name is unknown."""
    return _CUTS.get(name)
