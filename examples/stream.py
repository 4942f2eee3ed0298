"""An answer as it is written, and what it cost: python examples/stream.py [MODEL]"""

import sys

from tonnage import LLM, SamplingParams

QUESTION = "Explain in two sentences why the sky is blue."


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with LLM(model, memory="1GiB", max_seq_len=1024) as llm:
        messages = [{"role": "user", "content": QUESTION}]
        stream = llm.stream(messages=messages, params=SamplingParams(max_tokens=80, stop="\n\n"))
        for delta in stream:
            print(delta.text, end="", flush=True)
        (sample,) = stream.output.samples
        print(f"\n\n{len(sample.token_ids)} tokens, ended by {sample.stop_reason or str(sample.finish_reason)!r}")
        for row in llm.ledger.audit():
            print(f"{row.line:12} planned {row.planned_bytes:13,} bytes, holds {row.actual_bytes or 0:13,}")


if __name__ == "__main__":
    main()
