"""Many callers, one memory budget; whoever loses patience gives its memory back: python examples/serve_many_async.py"""

import asyncio
import sys

from tonnage import AsyncLLM, SamplingParams

NUM_CALLERS = 24
#: This one hangs up after a few pieces of text.
IMPATIENT = 5


async def caller(llm: AsyncLLM, number: int) -> None:
    messages = [{"role": "user", "content": f"Tell me something about the number {number}."}]
    stream = llm.stream(messages=messages, params=SamplingParams(max_tokens=32, temperature=0.8, seed=number))
    text, num_pieces = "", 0
    async for delta in stream:
        text, num_pieces = text + delta.text, num_pieces + 1
        if number == IMPATIENT and num_pieces == 4:
            await stream.aclose()
    print(f"{number:2} {'hung up' if stream.output is None else 'heard'}: {' '.join(text.split())}")


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    async with AsyncLLM(model, memory="1GiB", max_seq_len=1024, kv_tokens=1024) as llm:
        await asyncio.gather(*(caller(llm, number) for number in range(NUM_CALLERS)))
        result, kv = await llm.result(), await llm.progress()
        print(f"{result.finished} finished, {result.cancelled} cancelled, {result.waited} had to wait for memory;")
        print(f"{kv.kv_used_tokens} of {kv.kv_total_tokens} KV tokens in use")


if __name__ == "__main__":
    asyncio.run(main())
