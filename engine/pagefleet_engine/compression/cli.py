"""`pagefleet quantize MODEL --output DIR`: settings, then the work. Torch is imported once they are right."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from pagefleet_protocol.settings.log import set_up_logging
from pagefleet_protocol.settings.program import Program

from pagefleet_engine.compression.settings import Algorithm, QuantizeConfig
from pagefleet_engine.config import EngineConfig, ModelConfig
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.settings import told_status

_STOPPED = 130

QUANTIZE = Program(
    name="pagefleet quantize",
    description="Writes a model's weights in 4 or 8 bits, as compressed-tensors, for pagefleet serve, vLLM and\n"
    "transformers. Computed on the CPU, a layer at a time.",
    groups={"quantization": QuantizeConfig},
    environment="PAGEFLEET_QUANTIZE_",
    error=ConfigError,
    positional=("model",),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Quantize a model; returns the exit status, as `pagefleet serve` has them."""
    try:
        config = QUANTIZE.build(
            QuantizeConfig, QUANTIZE.read(sys.argv[1:] if arguments is None else arguments, os.environ)
        )
        set_up_logging("quantize")
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, _stop)
        print(_run(config))
    except ConfigError as error:
        return told_status(error, QUANTIZE)
    except KeyboardInterrupt:
        QUANTIZE.say("stopped; nothing was written")
        return _STOPPED
    return 0


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _run(config: QuantizeConfig) -> str:
    from pagefleet_engine.compression.calibration import read_text  # noqa: PLC0415 --help must not wait for torch
    from pagefleet_engine.compression.quantize import quantize  # noqa: PLC0415
    from pagefleet_engine.compression.recipe import Recipe  # noqa: PLC0415
    from pagefleet_engine.engine_core.model_folder import resolve_model_folder  # noqa: PLC0415
    from pagefleet_engine.gguf.folder import gguf_at  # noqa: PLC0415
    from pagefleet_engine.loader.new_folder import check_new  # noqa: PLC0415
    from pagefleet_engine.local_model import with_local_model  # noqa: PLC0415
    from pagefleet_engine.models.config_file import read_arch  # noqa: PLC0415
    from pagefleet_engine.text.model_files import load_text_model  # noqa: PLC0415

    if config.group_size == 0:
        raise ConfigError("--group-size is 0: give the inputs that share a scale, or -1 for whole rows")
    usual: Algorithm = "rtn" if config.scheme.startswith("fp8") else "gptq"
    algorithm = usual if config.algorithm == "auto" else config.algorithm
    in_groups = config.scheme.startswith("w") and config.group_size > 0
    recipe = Recipe(
        scheme=config.scheme,
        algorithm=algorithm,
        group_size=config.group_size if in_groups else None,
        actorder=config.actorder if algorithm == "gptq" else "none",
        dampening_frac=config.dampening_frac,
        ignore=config.ignore,
        kv_cache_scheme=config.kv_cache_scheme,
    )
    recipe.check()
    check_new(config.output, "--output")
    model = ModelConfig(model=config.model, revision=config.revision, download_dir=config.download_dir)
    folder = resolve_model_folder(with_local_model(EngineConfig(model=model), os.environ).model.model)
    if gguf_at(folder) is not None:
        raise ModelLoadError(f"{config.model} is in GGUF: give the model in a float type, in safetensors")
    text_model = load_text_model(folder, folder)
    length = min(config.max_seq_length, read_arch(folder).default_length)
    text = read_text(config.calibration, text_model, config.num_calibration_samples, length)
    report = quantize(folder, recipe, text, config.output, QUANTIZE.say, config.dtype)
    return f"{report.table()}\nwritten to {config.output}"


if __name__ == "__main__":
    sys.exit(main())
