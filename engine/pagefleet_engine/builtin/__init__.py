"""Models that are part of this package: what `builtin://NAME` stands for. `python -m tiny.train` writes them."""

from pathlib import Path

from pagefleet_engine.errors import ModelLoadError

_FOLDER = Path(__file__).parent


def builtin_model_path(name: str) -> Path:
    """Return the folder of a model that comes with the engine, in Hugging Face layout.

    Args:
        name: what follows `builtin://`, such as `tiny`.

    Raises:
        ModelLoadError: there is no such model; the message names those that there are.
    """
    known = sorted(config.parent.name for config in _FOLDER.glob("*/config.json"))
    if name not in known:
        raise ModelLoadError(f"builtin://{name}: no such built-in model; there is: {', '.join(known)}")
    return _FOLDER / name
