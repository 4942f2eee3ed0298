"""The file that spares a start its probes: what an earlier one measured, if this one would measure the same."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tonnage
from tonnage.buffers.torch_settings import NO_CACHE, VARIABLES
from tonnage.engine.site import Site
from tonnage.engine.target import Target
from tonnage.errors import InputError
from tonnage.files import to_read, why
from tonnage.report import StartFigures, parse_start, start_text
from tonnage.terms import Measured, MemoryPlan, Quantity
from tonnage.units import MiB, format_bytes

#: By so much what a process holds before its pool differs from start to start; what is kept free pays for it.
WOBBLE_BYTES = 8 * MiB
#: Packages whose code decides what a step takes.
_PACKAGES = ("torch", "transformers", "triton")
#: Differences that are told; of more only the number is.
_NUM_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A path, and what an earlier start left there; ``plan`` and ``figures`` are None where there is no file yet."""

    path: Path
    plan: MemoryPlan | None = None
    figures: StartFigures | None = None

    @classmethod
    def read(cls, path: str | Path) -> PlanFile:
        """Raises ``InputError`` for a file that no start has written, or that was changed since, and for a place where
        none can be written."""
        path = Path(path).expanduser()
        problem = _place_problem(path)
        if problem:
            remedy = "name a file in a folder that can be written"
            raise InputError(f"The plan file {path} {problem}", knob="plan_file", value=str(path), remedy=remedy)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls(path=path)
        except (OSError, UnicodeDecodeError) as fault:
            told = f"The plan file {path} cannot be read: {why(fault)}"
            raise InputError(told, knob="plan_file", value=str(path), remedy=to_read(fault)) from None
        plan, figures = parse_start(text, file=str(path))
        return cls(path=path, plan=plan, figures=figures)

    def usable(self, key: Mapping[str, str]) -> Measured | None:
        """What was measured with that ``key``; None where nothing was."""
        return self.figures.measured if self.figures is not None and self.figures.key == key else None

    def told(self, key: Mapping[str, str]) -> str:
        """Whether the file spared the probes, and if not, why; a sentence."""
        if self.figures is None:
            return f"{self.path} was not there: the probes were run, and what they measured is for the next start"
        then = self.figures.key
        names = [name for name in sorted({*then, *key}) if then.get(name) != key.get(name)]
        if not names:
            return f"{self.path} was used: no probes were run"
        told = [f"{name} {then.get(name, 'unknown')} and is {key.get(name, 'unknown')} now" for name in names]
        more = f" (and {len(names) - _NUM_TOLD} differences more)" if len(names) > _NUM_TOLD else ""
        return f"{self.path} was measured with {', '.join(told[:_NUM_TOLD])}{more}: the probes were run again"

    def write(self, plan: MemoryPlan, figures: StartFigures) -> None:
        """Whole or not at all: beside its place first. Raises ``InputError`` where it cannot be written."""
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            try:
                with beside.open("w", encoding="utf-8", newline="\n") as out:
                    out.write(start_text(plan, figures))
                    out.flush()
                    os.fsync(out.fileno())
                beside.replace(self.path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as fault:
            raise InputError(
                f"The plan file {self.path} cannot be written: {fault.strerror}",
                knob="plan_file",
                value=str(self.path),
                remedy="name a file in a folder that can be written",
            ) from None


#: How much cuBLAS takes for its workspaces, of torch's memory.
_WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")


def key_of(target: Target, site: Site) -> dict[str, str]:
    """All that a start's figures depend on. What was asked about money is not among it: that is arithmetic."""
    options, config, limits = target.options, target.config, target.limits
    raw = json.dumps(dict(config.raw), sort_keys=True, default=str)
    found = {
        "model": f"{config.name} {hashlib.sha256(raw.encode()).hexdigest()[:16]}",
        "dtype": target.dtype,
        "kv_dtype": target.kv.groups[0].parts[0].dtype,
        "weights_bytes": str(target.weights.total_bytes),
        "block_tokens": str(target.block_tokens),
        "attention": options.attention_backend,
        "compile": str(options.compile),
        "overlap": str(options.is_ahead),
        "torch_segments": str(options.torch_segments),
        "virtual_memory": str(site.driver.capabilities().vmm),
        "host_kv_bytes": str(options.host_kv_bytes),
        "tonnage": tonnage.__version__,
        **{package: _version(package) for package in _PACKAGES},
        **{f"limits.{f.name}": str(getattr(limits, f.name)) for f in fields(limits)},
        **site.identity(),
    }
    variables = {name: os.environ[name] for name in (*VARIABLES, NO_CACHE, *_WORKSPACES) if name in os.environ}
    return found | variables


def agreed(then: Measured, now: Measured, *, keep_free_bytes: int) -> tuple[Measured, str]:
    """What to plan from, and a sentence where that is not ``then``.

    ``now`` holds this start's own figures for what is there whether probes run or not: the context, libraries, graphs
    and others. As long as they take no more together than then, but for a wobble that ``keep_free_bytes`` pays, the
    plan is that of ``then`` to the byte; else it counts with what is there now.
    """
    fixed = _fixed(then, now)
    more = sum(new - old for old, new in fixed.values())
    if more <= min(WOBBLE_BYTES, keep_free_bytes):
        return then, ""
    told = [f"{name} {format_bytes(new)} instead of {format_bytes(old)}" for name, (old, new) in fixed.items()]
    told = [text for text, (old, new) in zip(told, fixed.values(), strict=True) if new > old]
    measured = replace(
        then, context=now.context, libraries=now.libraries, graphs=now.graphs, foreign_bytes=now.foreign_bytes
    )
    return measured, f"the pool is {format_bytes(more)} smaller than the plan file has it: {', '.join(told)}"


def _place_problem(path: Path) -> str:
    """Why no file can be kept there; empty: one can."""
    if path.is_dir():
        return "is a folder"
    if not path.parent.is_dir():
        return f"lies in {path.parent}, and there is no such folder"
    return "" if os.access(path.parent, os.W_OK) else f"lies in {path.parent}, which cannot be written"


def _fixed(then: Measured, now: Measured) -> dict[str, tuple[int, int]]:
    """Bytes then and now, by who holds them."""
    return {
        "the context takes": (then.context.bytes, now.context.bytes),
        "libraries take": (then.libraries.bytes, now.libraries.bytes),
        "graphs keep": (_bytes(then.graphs), _bytes(now.graphs)),
        "others hold": (then.foreign_bytes.bytes, now.foreign_bytes.bytes),
    }


def _bytes(quantity: Quantity | None) -> int:
    return 0 if quantity is None else quantity.bytes


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
