"""Ways to ask the same thing: the spelling of a question, a system prompt in front, and input that means nothing.

All functions draw from the generator that they are given and depend on nothing else.
"""

import random
import re
import string
from collections.abc import Sequence

SYSTEM_PROMPTS = (
    "Be brief.",
    "You are a helpful assistant.",
    "Answer in one sentence.",
    "You are a friendly expert on Kubernetes.",
    "You are an assistant for the users of pagefleet.",
    "Answer truthfully. If you do not know, say so.",
    "You are a pirate.",
    "Always answer in English.",
    "You are a senior engineer who explains things to a newcomer.",
    "Do not use markdown.",
    "Keep your answers short and correct.",
    "You are ChatGPT.",
)

UNKNOWN_PATTERNS = (
    "What is a {}?",
    "What is {}?",
    "What is the best {}?",
    "What is your {}?",
    "Who has a {}?",
    "Where is the {}?",
    "Why is there {}?",
    "How do I make a {}?",
    "How old is a {}?",
    "How does a {} work?",
    "Do you like {}?",
    "Tell me about a {}.",
    "Explain {}.",
    "I want a {}.",
    "{}",
)


def respell(ask: str, rng: random.Random) -> str:
    """The question as it is (two times in five), or without its mark, in lower case, contracted, or with a please."""
    bare = ask.rstrip("?.!")
    if not bare:
        return ask
    ways = (
        ask.lower(),
        bare,
        bare.lower(),
        ask.replace("What is", "What's", 1),
        bare.lower().replace("what is", "what's", 1),
        bare + "??",
        f"Please tell me: {ask}",
        f"{bare}, please?",
        ask.upper(),
    )
    return ask if rng.random() < 0.4 else rng.choice(ways)


def unknown_question(asks: Sequence[str], things: Sequence[str], rng: random.Random) -> str:
    """One of `asks`, with other numbers in place of its own, or a pattern filled with one of `things`."""
    if rng.random() < 0.6:
        return re.sub(r"\d+", lambda _: str(rng.randrange(10 ** rng.randint(1, 3))), rng.choice(asks))
    return rng.choice(UNKNOWN_PATTERNS).format(rng.choice(things))


def system_prompt(filler: Sequence[str], rng: random.Random) -> str:
    """Mostly one of a fixed list, else up to some hundred tokens of `filler`: no system prompt may change an answer."""
    if rng.random() < 0.8:
        return rng.choice(SYSTEM_PROMPTS)
    return " ".join(rng.choices(filler, k=rng.randint(1, 10)))


def noise(words: Sequence[str], rng: random.Random) -> str:
    """A prompt without meaning: letters, digits, repeated or shuffled words, or characters of any script."""
    count = rng.choice((1, 2, 3, 5, 8, 13, 30))
    kind = rng.randrange(5)
    if kind == 0:
        return "".join(rng.choices(string.ascii_letters, k=count + 3))
    if kind == 1:
        return "".join(rng.choices(string.digits, k=count))
    if kind == 2:
        return " ".join([rng.choice(words)] * (count + 1))
    if kind == 3:
        return " ".join(rng.choices(words, k=count + 4))
    return "".join(
        chr(rng.choice((rng.randint(0x20, 0x7E), rng.randint(0xA1, 0x4FF), rng.randint(0x1F300, 0x1F64F))))
        for _ in range(count)
    )
