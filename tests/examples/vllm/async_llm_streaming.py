"""Text as it comes, of several prompts."""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(
        max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
        if output.finished:
            print("\n[finished]")
            break


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="facebook/opt-125m", enforce_eager=True))
    try:
        for i, prompt in enumerate(["The future of artificial intelligence is", "In a galaxy far away", "What is"]):
            await stream_response(engine, prompt, f"stream-example-{i}")
            await asyncio.sleep(0)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
