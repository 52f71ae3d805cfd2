"""The engine's own flags, and the model's own sampling parameters, changed before they are used."""

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser()
    EngineArgs.add_cli_args(made)
    made.set_defaults(model="facebook/opt-125m")
    sampling = made.add_argument_group("Sampling parameters")
    for name, kind in (("max-tokens", int), ("temperature", float), ("top-p", float), ("top-k", int)):
        sampling.add_argument(f"--{name}", type=kind)
    return made


def main(args: dict) -> None:
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    top_p, top_k = args.pop("top_p"), args.pop("top_k")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if temperature is not None:
        params.temperature = temperature
    if top_p is not None:
        params.top_p = top_p
    if top_k is not None:
        params.top_k = top_k
    for output in llm.generate(["Hello, my name is", "What is"], params):
        print(len(output.outputs[0].token_ids), output.outputs[0].text)


if __name__ == "__main__":
    main(vars(parser().parse_args(["--max-tokens", "5", "--temperature", "0", "--max_model_len", "256"])))
