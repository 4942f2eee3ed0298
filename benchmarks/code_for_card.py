"""What layers keep when they are compiled for a card, with no card: Inductor's code for an H200, on fake tensors.

It needs torch built for CUDA (2.11 here) and no driver: what asks for one is given the figures of an H200. Each kind
of layer of the published shapes is compiled; kernels are not built, and the wrapper that allocates, calls and frees
runs on fake tensors under the storage tracker. So the order, the sizes and the places of buffers are the compiler's,
and only whether a card then takes as much is left open. Beside it stands what `engine/exact/fusion.py` says of the
same layer.

    python benchmarks/code_for_card.py --output benchmarks/results/DATE-code-for-h200.json
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

import exact_peaks
from exact_shapes import CARD_SHAPES, DTYPE, HOST_SHAPES, config_of, small
from filing import file_away, parser
from tonnage.costs.config import ModelConfig
from tonnage.engine.exact.fusion import compiled_events
from tonnage.engine.exact.probe import kind_of, reserved_by
from tonnage.engine.exact.segments import Event
from tonnage.engine.exact.skeleton import Skeleton, attention
from tonnage.engine.exact.steps import forward
from tonnage.engine.exact.trace import Region, Trace, Tracer, top_of
from tonnage.engine.family import FAMILIES
from tonnage.units import MiB

TOKENS = 8192
H200 = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=150_109_880_320, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65_536, max_threads_per_block=1024, gcnArchName="",
    shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472,
    L2_cache_size=62_914_560,
)  # fmt: skip
#: Small widths whose attention sets the peak, and published shapes.
SHAPES = {
    **CARD_SHAPES,
    **{name: shape for name, shape in HOST_SHAPES.items() if "wide" in name or "narrow" in name},
    "Mixtral-8x7B": small(exact_peaks.LLAMA, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2),
}


class Written(Exception):
    """The compiler has written its code: that is all that was wanted of it."""


class Nothing:
    """Takes whatever it is called with, does nothing, keeps nothing; so do its attributes."""

    def __call__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Nothing:
        return self


class Called:
    """Kernels that the code calls: they write where they are told to, or make a tensor as the operation does."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, out: torch.Tensor | None = None, **how: Any) -> Any:
            return out if out is not None else getattr(torch.ops.aten, name).default(*args, **how)

        return call


def stand_ins() -> Iterator[Any]:
    """Patches for whatever asks a driver."""
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.post_grad as post
    import torch._subclasses.fake_tensor as fakes
    import torch.utils._triton as triton
    from torch._inductor.graph import GraphLowering

    cuda = interfaces.CudaInterface
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", True), (torch.cuda, "current_device", 0), (torch.cuda, "device_count", 1),
        (torch.cuda, "get_device_properties", H200), (torch.cuda, "get_device_capability", (9, 0)),
        (torch.cuda, "_lazy_init", None), (torch.cuda, "_exchange_device", 0), (torch.cuda, "set_device", None),
        (torch.cuda, "_maybe_exchange_device", 0), (torch.cuda, "get_rng_state", torch.get_rng_state()),
        (torch.cuda, "set_rng_state", None), (torch.cuda, "synchronize", None), (torch.cuda, "is_initialized", False),
        (cuda.Worker, "get_device_properties", H200), (cuda.Worker, "current_device", 0),
        (cuda, "get_device_properties", H200), (cuda, "get_compute_capability", 90), (cuda, "is_available", True),
        (cuda, "exchange_device", 0), (cuda, "maybe_exchange_device", 0), (fakes, "init_gpu_context", None),
        (triton, "has_triton", True), (triton, "triton_hash_with_backend", "none"), (triton, "triton_backend", None),
        (joint, "lazy_init", None), (post, "lazy_init", None),
    ]  # fmt: skip
    for owner, name, answer in answers:
        yield mock.patch.object(owner, name, mock.Mock(return_value=answer))

    def stop(graph: GraphLowering) -> None:
        code = graph.codegen()[0]
        raise Written(getattr(code, "value", code))

    yield mock.patch.object(GraphLowering, "compile_to_module", stop)
    # It makes the shape of a scatter's result by a copy between tensors of the card.
    yield mock.patch("torch._inductor.fx_passes.reinplace._inplace_generalized_scatter", lambda into, *_: into.clone())
    yield mock.patch("torch._C._cuda_getCurrentRawStream", mock.Mock(return_value=0))


def on_card(tensor: torch.Tensor) -> torch.Tensor:
    """As large a fake tensor there; the layer's number stays on the host, as the engine has it."""
    is_number = tensor.dim() == 0 and tensor.dtype == torch.int64
    device = "cpu" if is_number else "cuda"
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def code_of(skeleton: Skeleton, layer: torch.nn.Module, num_tokens: int) -> tuple[str, list[torch.Tensor]]:
    """The compiler's code of one layer, and the arguments that it wants."""
    from torch._inductor import compile_fx

    seen: list[Any] = []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with skeleton.running():
        ids, positions = (torch.zeros(1, num_tokens, dtype=torch.int64) for _ in range(2))
        skeleton.base(input_ids=ids, position_ids=positions, use_cache=False)
        hook.remove()
        args, kwargs = seen[-1]
        state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        given, shape = tree_flatten((state, args, kwargs))
        # The number that attention is called with would be a constant of the code: it is an argument, too.
        tensors = [*(leaf for leaf in given if isinstance(leaf, torch.Tensor)), attention.number]

        def run(*tensors: torch.Tensor) -> Any:
            rest, attention.number = iter(tensors), tensors[-1]
            leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
            state, args, kwargs = tree_unflatten(leaves, shape)
            return torch.func.functional_call(layer, state, args, kwargs)

        graph = make_fx(run)(*tensors)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda")}
        graph.recompile()
        leaves = [on_card(tensor) for tensor in tensors]
        try:
            compile_fx.compile_fx(graph, leaves)
        except Exception as error:
            cause: Any = error
            while cause is not None and not isinstance(cause, Written):
                cause = cause.__cause__ or getattr(cause, "inner_exception", None) or cause.__context__
            if cause is None:
                raise
            return str(cause), leaves
    raise AssertionError("the compiler returned")


def played(code: str, leaves: list[torch.Tensor], skeleton: Skeleton) -> Trace:
    """The wrapper run on fake tensors: kernels do nothing, and whatever it allocates is written down."""
    from torch._inductor.async_compile import AsyncCompile

    nothing = Nothing()
    with mock.patch.object(AsyncCompile, "triton", nothing), mock.patch.object(AsyncCompile, "wait", nothing):
        names: dict[str, Any] = {"__name__": "compiled"}
        exec(compile(code, "compiled", "exec"), names)
    names.update(
        empty_strided_cuda=lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"),
        reinterpret_tensor=lambda each, size, stride, offset=0: torch.as_strided(each, size, stride, offset),
        extern_kernels=Called(), assert_size_stride=nothing, assert_alignment=nothing, get_raw_stream=nothing,
    )  # fmt: skip
    for name in [each for each in names if each.startswith("triton_")]:
        names[name] = nothing
    # Constants of the graph are not among the arguments, and are not allocated by it.
    runner = names.get("call") or names["runner"].call
    with skeleton.mode, torch.no_grad():
        tracer = Tracer(leaves)
        with tracer:
            made = runner(list(leaves))
            del made
    return tracer.trace


def compared(name: str, config: ModelConfig, *, packed: bool, num_tokens: int) -> Iterator[dict[str, Any]]:
    """One row a kind of layer: its highest point by the compiler's code and by the rules, beside what lives outside,
    and what torch's allocator takes for either."""
    family = FAMILIES.get(config.model_type) if packed else None
    skeleton = Skeleton(config, dtype=DTYPE, layers=range(config.num_layers), family=family, layers_of_a_kind=2)
    trace = forward(skeleton, num_tokens=num_tokens, logits_rows=0)
    for region, layer in kinds_of(skeleton, trace):
        alone = Trace(ops=trace.ops)
        alone.events, alone.at = trace.events[region.begin : region.end], trace.at[region.begin : region.end]
        alone.regions = [replace(region, begin=0, end=region.end - region.begin)]
        by_rules, at = compiled_events(alone)
        code, leaves = code_of(skeleton, layer, num_tokens)
        by_code = played(code, leaves, skeleton).events
        before = trace.events[: region.begin]
        outside = sum(num_bytes for _, num_bytes in before)
        written, estimated = (outside + top_of(events).num_bytes for events in (by_code, by_rules))
        number = at[top_of(by_rules).event]
        row = {"case": name, "packed": packed, "tokens": num_tokens, "layer": type(layer).__name__,
               "kind": kind_of(trace.ops[number].module, config), "written": written, "estimated": estimated,
               "written_reserved": reserved_beside(before, by_code),
               "estimated_reserved": reserved_beside(before, by_rules)}  # fmt: skip
        print(sentence(row), flush=True)
        yield row


def sentence(row: dict[str, Any]) -> str:
    told = f"{row['case']:28s} {'packed' if row['packed'] else 'apart':6s} {row['kind']:20s}"
    for what in ("", "_reserved"):
        written, estimated = row[f"written{what}"], row[f"estimated{what}"]
        told += f" {what.strip('_')} {written / MiB:9.2f} / {estimated / MiB:9.2f} ({written / estimated:.4f})"
    return told


def reserved_beside(before: list[Event], events: list[Event]) -> int:
    """Of a layer's events, twice, beside what is alive when it begins."""
    alive = {}
    for key, num_bytes in before:
        if num_bytes > 0:
            alive["outside", key] = num_bytes
        else:
            alive.pop(("outside", key), None)
    balance: dict[Any, int] = {}
    for key, num_bytes in events:
        balance[key] = balance.get(key, 0) + num_bytes
    # What the layer returns goes before the next one like it: the layer after that reads it, and so on.
    ends = [(key, -num_bytes) for key, num_bytes in balance.items() if num_bytes > 0]
    return reserved_by([list(alive.items()), [*events, *ends], [*events, *ends]])


def kinds_of(skeleton: Skeleton, trace: Trace) -> list[tuple[Region, torch.nn.Module]]:
    """The last layer of each kind, and its region."""
    names = {module: name for name, module in skeleton.model.named_modules()}
    found = {}
    for region in trace.regions:
        modules = {op.module for op in trace.ops[region.first_op : region.last_op]}
        for layer in skeleton.layers:
            name = names[layer]
            if any(module == name or module.startswith(f"{name}.") for module in modules):
                found[str([(path, type(module)) for path, module in layer.named_modules()])] = region, layer
    return list(found.values())


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="names of cases that contain this")
    asked = options.parse_args()
    rows: list[dict[str, Any]] = []
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.joint_graph_constant_folding = False  # it would compute on the card
    for patch in stand_ins():
        patch.start()
    for name, shape in SHAPES.items():
        if asked.only not in name:
            continue
        config = config_of(name, shape)
        own = FAMILIES.get(config.model_type)
        for packed in (False, True) if own and own.packs else (False,):
            rows += compared(name, config, packed=packed, num_tokens=TOKENS)
    file_away(asked.output, {"dtype": DTYPE, "code_for": H200.name, "rows": rows}, commit=asked.commit)
    return 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    raise SystemExit(main())
