"""Where a text model's tensors stand in a checkpoint that holds a model of images beside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NameLayout:
    """How a checkpoint names the tensors of its text model, and which are not of it."""

    prefixes: tuple[tuple[str, str], ...] = ()
    """A prefix of ours, and what stands there in the checkpoint."""
    foreign: tuple[str, ...] = ()
    """Prefixes of what no text model needs."""

    def stored_name(self, name: str) -> str:
        """The checkpoint's name for our `name`."""
        for ours, theirs in self.prefixes:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name


_PLAIN = NameLayout()
_AROUND = NameLayout(
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    ("vision_tower.", "multi_modal_projector."),
)
_WITHIN = NameLayout((("model.", "model.language_model."),), ("model.vision_tower.", "model.multi_modal_projector."))


def layout_of(stored: Iterable[str]) -> NameLayout:
    """The layout of a checkpoint with these tensors: with the text model as a part, or on its own."""
    for name in stored:
        for layout in (_AROUND, _WITHIN):
            if name.startswith(layout.stored_name("model.")):
                return layout
    return _PLAIN
