"""What TensorRT-LLM does at start-up, as rules with their dates, records and sources."""

from __future__ import annotations

from tonnage.peers.start import Rule
from tonnage.terms import Line, LineKind

#: What the reference policy was read from.
READ = "fa013630, docs/reference-policy.md"
#: The first release whose default is the PyTorch backend.
PYTORCH = (1, 0)

ENGINE_POOL = Rule(
    name="pool of an engine",
    says="Once an engine is loaded the pool takes free_gpu_memory_fraction of what is free, in whole blocks rounded "
    "up; nothing is probed, for an engine knows its activations.",
    before=PYTORCH,
    records=("trtllm-doc-memory", "trt-fs-10054575706", "trtllm-1400"),
    source="TensorRT-LLM's memory page",
)
ENGINE_WEIGHTS = Rule(
    name="weights", says="The engine's own size.", before=PYTORCH, records=("trtllm-1400",), source="start-up logs"
)
WEIGHTS = Rule(name="weights", says="Part of the measured peak.", since=PYTORCH, source=READ)
ENGINE_CONTEXT = Rule(
    name="execution context",
    says="Activations for max_num_tokens, known when the engine was built: 91 MiB and 262 MiB for two lengths of one "
    "7B model, 2.2 GiB for DeepSeek V3; here our own closed form, with buffers of the decoder beside it (0.18 GiB).",
    before=PYTORCH,
    records=("trt-fs-71322705288", "trtllm-2683", "trtllm-doc-memory"),
    source="start-up logs",
)
CONTEXT = Rule(
    name="context",
    says="The driver's context and library handles, and collectives with several ranks; each rank leaves about 0.5 GiB "
    "more on the first card.",
    records=("trtllm-1400",),
    source="start-up logs",
)
ENGINE_LEFT = Rule(
    name="left free",
    says="What the fraction leaves; attention workspace that grows on demand comes out of it (67 MB in one log).",
    before=PYTORCH,
    records=("triton-tut-150",),
    source="start-up logs",
)
ONE_SEQUENCE = Rule(
    name="one sequence",
    says="A pool of less than one sequence lowers max_seq_len in silence.",
    since=PYTORCH,
    source=READ,
)
BUDGET = Rule(
    name="budget",
    says="total - peak - reserves on the peak + the probe's own pool, times free_gpu_memory_fraction, less what is "
    "deducted after it; whole blocks of the fewest tokens of all ranks.",
    since=PYTORCH,
    records=("trtllm-5306", "triton-tut-150", "fs-70957398956"),
    source=READ,
)
SLACK = Rule(
    name="slack",
    says="What the fraction leaves; all that nobody measured or declared lives off it, and where it has too little the "
    "start goes on and the first request that needs the rest fails.",
    since=PYTORCH,
    source=READ,
)

#: What a line of the reference's plan is, in a sentence.
_SAYS = {
    LineKind.WEIGHTS: "Part of the measured peak.",
    LineKind.KV: BUDGET.says,
    LineKind.TRANSIENT: "Part of the measured peak: one full prefill step of plain prompts, with graphs captured.",
    LineKind.GRAPHS: "Part of the measured peak: graphs are captured before the probe.",
    LineKind.CONTEXT: "Part of the measured peak: all that the device holds beside torch.",
    LineKind.LIBRARIES: "Part of the measured peak: all that the device holds beside torch.",
    LineKind.FOREIGN: "Part of the measured peak: strangers count as the engine's own.",
    LineKind.SLACK: SLACK.says,
}


def of_line(line: Line) -> Rule:
    """The rule behind one line of the reference's plan."""
    if line.kind is LineKind.KV:
        return BUDGET
    if line.kind is LineKind.SLACK:
        return SLACK
    return Rule(name=line.name, says=_SAYS.get(line.kind, f"{line.reason}."), since=PYTORCH, source=READ)
