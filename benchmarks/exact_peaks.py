"""What `tonnage plan --exact` says of a forward, beside the real layers run with random weights.

On a card (`--device cuda`): published shapes at 2,048, 8,192 and 16,384 tokens, as they are and compiled as the engine
compiles them; torch's own peaks of allocated and reserved bytes. Where projections are packed as the engine packs them,
the stages of a start stand beside their intervals: a prefill, a decode, a decode whose sampler has everything to do,
and what torch reserves for all of them, one after the other, twice. A case that fails is told and filed, and the next
one runs; what is there is filed after each.
On a host: small shapes of the same families, compiled by the same compiler for a CPU, whose allocator the profiler
watches: scratch that a product takes inside itself is left out, and what torch's caching allocator would reserve for 32
times these bytes is replayed.
Attention only makes its result in either: its scratch is declared elsewhere. A few layers of each kind are run, since
the peak does not depend on how many there are (tests/cpu/test_exact.py); `--layers 0` runs all.

    python benchmarks/exact_peaks.py --device cuda --output exact.json
    python benchmarks/exact_peaks.py --output benchmarks/results/DATE-cpu-exact-peaks.json
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._inductor.config

from exact_shapes import CARD_SHAPES, DTYPE, HOST_SHAPES, config_of
from filing import file_away, parser
from tonnage.config import Limits
from tonnage.costs.config import ModelConfig
from tonnage.engine.attend import ATTENTION_NAME, attending, register_attention
from tonnage.engine.compiled import compile_layers
from tonnage.engine.exact import FakeProbe
from tonnage.engine.exact.probe import reserved_by, seen_step
from tonnage.engine.exact.segments import Event
from tonnage.engine.exact.skeleton import Skeleton
from tonnage.engine.exact.steps import forward, sampling_rows, tile_elements
from tonnage.engine.family import FAMILIES, Family
from tonnage.engine.packing import packed_order
from tonnage.engine.sampling import Sampler
from tonnage.engine.weights import class_layout, experts_implementation, place_parameters
from tonnage.errors import InvalidSetting
from tonnage.hardware import Card, find_card, generic_card
from tonnage.planner.limits import MAX_LOGPROBS
from tonnage.terms import Quantity, Rank, StepShape
from tonnage.units import MiB

CARD_TOKENS, LOGITS_ROWS = (2048, 8192, 16_384), 256
HOST_TOKENS, HOST_SCALE = (1000,), 32


class ResultAlone:
    """Attention that only makes its result."""

    def forward(self, _: object, __: int, query: Any, ___: Any, value: Any, **____: object) -> torch.Tensor:
        made: torch.Tensor = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        return made


def built(config: ModelConfig, family: Family, device: torch.device) -> torch.nn.Module:
    """The model with random weights, all in one allocation as the engine has them, projections packed by ``family``."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    register_attention()
    library = CONFIG_MAPPING[config.model_type].from_dict(dict(config.raw))
    experts = experts_implementation(library, DTYPE) or ("grouped_mm" if config.raw.get("n_routed_experts") else None)
    with device:
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            library, dtype=getattr(torch, DTYPE), attn_implementation=ATTENTION_NAME, experts_implementation=experts
        )
    layout = packed_order(class_layout(model), family.packs)
    arena = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
    arena.view(torch.bfloat16).normal_(0, 0.02)
    place_parameters(model, layout, arena, family)
    if device.type == "cuda":
        _settle(device)
    return model.eval().requires_grad_(requires_grad=False)


def _settle(device: torch.device) -> None:
    """The library of products takes its workspace from torch's cache: in a segment of its own, before any step leaves
    one there that it would keep from being given back."""
    gc.collect()
    torch.cuda.empty_cache()
    square = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    (square @ square).sum().item()
    torch.cuda.empty_cache()


class Step:
    """One forward and its logits, as the executor runs them, over inputs that were there before; with ``draws`` a
    token of each row, too: the most probable one, or with everything that a request may ask for."""

    def __init__(
        self, model: Any, num_tokens: int, logits_rows: int, device: torch.device, *, draws: str | None = None
    ) -> None:
        self._model, self._rows = model, logits_rows
        self._ids = torch.randint(0, 900, (1, num_tokens), device=device)
        self._positions = torch.arange(num_tokens, device=device)[None]
        self._places = torch.arange(logits_rows, device=device)
        self._sampler = Sampler(model.config.vocab_size, tile_elements=tile_elements("cuda"))
        self._asked = None
        if draws is not None:
            self._asked = sampling_rows(
                logits_rows, num_logprobs=MAX_LOGPROBS, penalties=False, is_plain=draws == "plain"
            )

    @torch.inference_mode()
    def __call__(self) -> None:
        with attending(ResultAlone(), None):  # type: ignore[arg-type]
            found = self._model.base_model(input_ids=self._ids, position_ids=self._positions, use_cache=False)
        hidden = found.last_hidden_state[0]
        if not self._rows:
            return
        chosen = hidden if self._rows == len(hidden) else hidden.index_select(0, self._places)
        logits = self._model.get_output_embeddings()(chosen)
        if self._asked is not None:
            self._sampler.draw(logits, self._asked)


# -- measuring ---------------------------------------------------------------------------------------------------


def card_peaks(step: Callable[[], None]) -> dict[str, int]:
    """Growth of what torch has allocated and reserved, from an empty cache. Whatever is made but once, code and the
    workspaces of libraries, must be there already. "idle": what lies free in segments that something else keeps, of
    which a step may take without reserving anything."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    step()
    torch.cuda.synchronize()
    after = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": after[0] - before[0], "reserved": after[1] - before[1], "idle": before[1] - before[0]}


def stage_peaks(model: torch.nn.Module, num_tokens: int, device: torch.device) -> dict[str, int]:
    """Of the stages that a start probes, by name; "reserved": for all of them one after the other, twice."""
    stages = {
        "prefill": Step(model, num_tokens, LOGITS_ROWS, device),
        "decode": Step(model, LOGITS_ROWS, LOGITS_ROWS, device, draws="plain"),
        "sampler": Step(model, LOGITS_ROWS, LOGITS_ROWS, device, draws="everything"),
    }
    for step in stages.values():
        step()
    found = {name: card_peaks(step)["allocated"] for name, step in stages.items()}
    both = card_peaks(lambda: [step() for _ in range(2) for step in stages.values()])
    return {**found, "reserved": both["reserved"], "idle": both["idle"]}


def host_peaks(step: Callable[[], None]) -> dict[str, int]:
    """The most bytes alive by the profiler; an allocation that is given back at once was a product's own."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    found = sorted(_allocations(watched.profiler.kineto_results.experimental_event_tree()))
    events = [(pointer, size) for _, pointer, size in found]
    kept, place = [], 0
    while place < len(events):
        (pointer, size), after = events[place], events[place + 1 : place + 2]
        if size > 0 and after == [(pointer, -size)]:
            place += 2
            continue
        kept.append((pointer, size))
        place += 1
    live = best = 0
    for _, size in kept:
        live += size
        best = max(best, live)
    return {"allocated": best, "reserved": reserved_by([scaled(kept)])}


def scaled(events: Sequence[Event]) -> list[Event]:
    """Small shapes in sizes of large ones, for which a caching allocator has other rules."""
    return [(key, HOST_SCALE * num_bytes) for key, num_bytes in events]


def _allocations(nodes: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Time, address and bytes of every allocation and release in the tree."""
    for node in nodes:
        if node.tag == torch._C._profiler._EventType.Allocation:
            yield node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size
        yield from _allocations(node.children)


# -- comparing ---------------------------------------------------------------------------------------------------


def estimates(config: ModelConfig, family: Family, num_tokens: int, logits_rows: int) -> dict[str, Any]:
    """Before coefficients: of the same step, as it is and compiled."""
    with warnings.catch_warnings():
        skeleton = Skeleton(config, dtype=DTYPE, layers=range(config.num_layers), family=family)
        trace = forward(skeleton, num_tokens=num_tokens, logits_rows=logits_rows)
    found = {}
    for name, is_compiled in (("eager", False), ("compiled", True)):
        seen = seen_step(name, StepShape(num_tokens=num_tokens), trace, config, is_compiled=is_compiled)
        reserved = reserved_by([seen.events if logits_rows else scaled(seen.events)])
        found[name] = {"allocated": seen.peak_bytes, "reserved": reserved, "kind": seen.kind, "phase": seen.phase}
    return found


def intervals(config: ModelConfig, num_tokens: int, *, card: Card | None = None) -> dict[str, Quantity]:
    """What `tonnage plan --exact` says of what ``stage_peaks`` measures, on the card that is there or ``card``.

    Raises ``RuntimeError`` where it says nothing. A plan sets aside what torch reserves for the stage that takes most;
    the others run in the same segments.
    """
    limits = Limits(
        max_seq_len=num_tokens,
        max_batch_size=LOGITS_ROWS,
        max_num_tokens=num_tokens,
        max_logits_rows=LOGITS_ROWS,
        max_logprobs=MAX_LOGPROBS,
    )
    probe = FakeProbe()
    stages = probe.stages(config, card=card or card_there(), limits=limits, rank=Rank(), dtype=DTYPE)
    if stages is None:
        raise RuntimeError("\n".join(probe.notes))
    reserved = max((stage.reserved for stage in stages), key=lambda taken: taken.bytes)
    return {**{stage.stage: stage.allocated for stage in stages}, "reserved": reserved}


def card_there() -> Card:
    try:
        return find_card(torch.cuda.get_device_name())
    except InvalidSetting:  # not in the catalogue: only its kind counts here
        return generic_card(80 * 2**30)


def compared(
    name: str, config: ModelConfig, sizes: Sequence[int], *, packed: bool, device: str
) -> list[dict[str, Any]]:
    """Every size, run as it is and then compiled."""
    is_card = device == "cuda"
    own = FAMILIES.get(config.model_type)
    family = own if packed and own is not None else Family(model_type=config.model_type)
    rows, where = LOGITS_ROWS if is_card else 0, torch.device("cuda" if is_card else "cpu")
    # The plan speaks of what the engine runs: packed where it packs. What it cannot say is told before a card is busy.
    is_planned = is_card and packed == bool(own and own.packs)
    told = {size: intervals(config, size) if is_planned else {} for size in sizes}
    found: list[dict[str, Any]] = [
        {"case": name, "packed": packed, "tokens": size, **estimates(config, family, size, rows)} for size in sizes
    ]
    model = built(config, family, where)
    for mode in ("eager", "compiled"):
        if mode == "compiled":
            compile_layers(model)
        for row in found:
            size = row["tokens"]
            for tokens in (size, size - 8):  # of two sizes, so that the code is for any number of tokens
                Step(model, tokens, rows, where)()
            step = Step(model, size, rows, where)
            step()
            row[mode] = {**(card_peaks if is_card else host_peaks)(step), "estimate": row[mode]}
    for row in found:
        if told[row["tokens"]]:
            measured = stage_peaks(model, row["tokens"], where)
            row["idle_bytes"] = measured["idle"]
            row["stages"] = {
                what: {"measured": measured[what], "low": each.low, "best": each.bytes, "high": each.high}
                for what, each in told[row["tokens"]].items()
            }
        print(sentence(row), flush=True)
    return found


def is_inside(stage: Mapping[str, int]) -> bool:
    return stage["low"] <= stage["measured"] <= stage["high"]


def sentence(row: Mapping[str, Any]) -> str:
    told = f"{row['case']:28s} {'packed' if row['packed'] else 'apart':6s} {row['tokens']:>6,}"
    for mode in ("eager", "compiled"):
        seen, estimate = row[mode], row[mode]["estimate"]
        told += f" | {mode} {seen['allocated'] / MiB:9.2f} / {estimate['allocated'] / MiB:9.2f}"
        told += f" ({seen['allocated'] / estimate['allocated']:.4f}) reserved {seen['reserved'] / MiB:7.0f}"
        told += f" / {estimate['reserved'] / MiB:7.0f}"
    told += f" | {row['compiled']['estimate']['kind']}"
    for what, stage in row.get("stages", {}).items():
        told += f" | {what} {stage['measured'] / MiB:.1f} {'inside' if is_inside(stage) else 'OUTSIDE'}"
        told += f" {stage['low'] / MiB:.1f} to {stage['high'] / MiB:.1f}"
        told += f" ({(stage['high'] - stage['low']) / stage['best']:.1%} wide)"
    return told


def tried(name: str, config: ModelConfig, sizes: Sequence[int], *, packed: bool, device: str) -> list[dict[str, Any]]:
    """``compared``; a case that fails is one row with its "error". Whatever it held is given back."""
    began = time.perf_counter()
    try:
        return compared(name, config, sizes, packed=packed, device=device)
    except Exception as error:  # noqa: BLE001 - the next case may have more luck, and a card's time is short
        traceback.print_exc()
        # The traceback holds every frame, and with them the model.
        traceback.clear_frames(error.__traceback__)
        return [{"case": name, "packed": packed, "error": f"{type(error).__name__}: {error}"}]
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}, {'packed' if packed else 'apart'}: {time.perf_counter() - began:.0f} s", flush=True)


def asked_for() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=None, help="layers of each model, 0 for all (default: a few)")
    options.add_argument("--only", default="", help="names of cases that contain this")
    return options.parse_args()


def main() -> int:
    asked = asked_for()
    is_card = asked.device == "cuda"
    if not is_card:
        # For a CPU the compiler writes concatenations out; for a card it computes them where they are read.
        torch._inductor.config.force_pointwise_cat = True
    if is_card and not torch.cuda.is_available():
        print("there is no card here", file=sys.stderr)
        return 1
    shapes, sizes = (CARD_SHAPES, CARD_TOKENS) if is_card else (HOST_SHAPES, HOST_TOKENS)
    figures: dict[str, Any] = {"dtype": DTYPE, "logits_rows": LOGITS_ROWS if is_card else 0, "rows": []}
    for name, shape in shapes.items():
        if asked.only not in name:
            continue
        changes = {} if asked.layers is None else {"num_hidden_layers": asked.layers or ALL_LAYERS.get(name, 4)}
        config = config_of(name, {**shape, **changes})
        own = FAMILIES.get(config.model_type)
        # On a card, what the engine runs comes first: nobody knows how long it stays.
        for packed in sorted({False, bool(own and own.packs)}, reverse=is_card):
            figures["rows"] += tried(name, config, sizes, packed=packed, device=asked.device)
            file_away(asked.output, figures, commit=asked.commit)
    stages = [stage for row in figures["rows"] for stage in row.get("stages", {}).values()]
    outside = sum(not is_inside(stage) for stage in stages)
    failed = [row["case"] for row in figures["rows"] if "error" in row]
    print(f"{outside} of {len(stages)} peaks outside their interval; failed: {', '.join(failed) or 'none'}")
    if asked.output is None:
        print(json.dumps(figures, indent=1))
    return 1 if outside or failed else 0


#: Layers of the published models, for ``--layers 0``.
ALL_LAYERS = {"Llama-3.1-8B": 32, "Qwen3-30B-A3B": 48, "Gemma-3-12B": 48, "DeepSeek-V2-Lite": 27}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    raise SystemExit(main())
