"""Several requests at once, of which one is given up."""

import asyncio

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def read(engine: AsyncLLMEngine, number: int) -> str:
    final = None
    params = SamplingParams(temperature=0, max_tokens=2000 if number == 1 else 10, ignore_eos=True)
    async for output in engine.generate("What is", params, f"request-{number}"):
        final = output
        if number == 1:
            await engine.abort("request-1")
    return f"{final.request_id} {final.outputs[0].finish_reason}"


async def main() -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="facebook/opt-125m"))
    await engine.check_health()
    print(await asyncio.gather(*(read(engine, number) for number in range(3))))
    engine.shutdown()


asyncio.run(main())
