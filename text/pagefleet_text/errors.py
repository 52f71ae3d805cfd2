"""What goes wrong between text and token ids.

TextError
├── PromptRefused     the conversation cannot be rendered: its author's mistake
└── TextDamaged       a tokenizer or chat template that cannot be used: the model's
"""

from __future__ import annotations


class TextError(Exception):
    """Root of the tree."""


class PromptRefused(TextError):
    """A conversation that no prompt can be made of.

    Attributes:
        param: the request's field, e.g. `messages`.
        code: a short machine-readable reason.
    """

    def __init__(self, message: str, param: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class TextDamaged(TextError):
    """A tokenizer or chat template is damaged, or of a kind that is not supported; the message is one line."""
