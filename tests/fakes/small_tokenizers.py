"""Tokenizers of the two supported families, made on the spot."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "grüße aus München, 你好世界, привет мир, emoji 😀👩‍👩‍👧 done",
    "def f(x):\n    return x + 1\n",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def byte_level_backend() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    return backend


def byte_fallback_backend() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for word in ["▁", "t", "h", "e", "th", "the", "▁the", "x", "▁x", "a", "你", "▁▁", "\n"]:
        vocab.setdefault(word, len(vocab))
    backend = Tokenizer(
        models.BPE(
            vocab,
            [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "x"), ("▁", "▁")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return backend
