"""Several questions at once, two answers each, inside 1 GiB: python examples/generate.py [MODEL]"""

import sys

from tonnage import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "How many legs does a spider have?",
    "What does a lighthouse do?",
]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    params = SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=1, n=2)
    with LLM(model, memory="1GiB", max_seq_len=1024) as llm:
        print(f"KV cache for {llm.plan.kv.tokens:,} tokens\n")
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for question, output in zip(QUESTIONS, llm.chat(conversations, params), strict=True):
            print(question)
            for sample in output.samples:
                print(f"  [{sample.finish_reason}, {len(sample.token_ids)} tokens] {sample.text.strip()}")


if __name__ == "__main__":
    main()
