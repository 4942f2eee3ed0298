"""A CUDA device: the driver's own figures, torch's allocator beside our arenas, and the boundary around it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from tonnage.buffers import Device, Stream
from tonnage.buffers.torch_fence import DEFAULT_SLACK_BYTES, close_boundary, open_boundary
from tonnage.buffers.torch_memory import TorchMemory
from tonnage.device.cuda import CudaDriver
from tonnage.device.cuda_devices import CudaDevice, cuda_devices
from tonnage.device.nvml import Nvml
from tonnage.device.reading import take_reading, wait_until_stable
from tonnage.device.without import WithoutVirtualMemory
from tonnage.engine.site import KV, ROUNDING_BYTES, Site, StepPeak, no_memory_left
from tonnage.engine.step_cache import StepCache
from tonnage.engine.step_segments import BESIDE_BYTES, StepSegments
from tonnage.errors import CannotMaterialize, DoesNotFit, DriverError, InvalidSetting
from tonnage.hardware import Card, find_card, generic_card
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind, Quantity, Reading, Source
from tonnage.units import round_up

RESTLESS = "others went on taking and giving memory of the device while this engine opened it"


class CudaSite(Site):
    """Device ``ordinal`` of those that this process sees, with torch on a stream of ours.

    The context, torch's start and whatever libraries take are this process's own from the beginning. Others on the
    card are told apart by NVML, or inferred from what was free before we came. ``why_static``: why its virtual memory
    is not used; empty: it is.
    """

    memory = MemoryKind.GPU
    driver: CudaDriver
    is_capped_by_use = True

    def __init__(self, ordinal: int, *, why_static: str = "") -> None:
        described = device_at(ordinal)
        free_before, told = _free_before(described)
        driver: Any = CudaDriver(ordinal)
        if why_static:
            driver = WithoutVirtualMemory(driver, why_static)
        try:
            if free_before is None:  # by NVML nobody could tell
                told = [] if wait_until_stable(lambda: driver.mem_info()[0])[1] else [RESTLESS]
            self._enter(driver, described, free_before)
            self.told += told
        except BaseException:
            driver.close()
            raise

    def _enter(self, driver: CudaDriver, described: CudaDevice, free_before: int | None) -> None:
        """Everything that ``driver`` is opened for."""
        ordinal, total = driver.ordinal, driver.mem_info()[1]
        ledger = Ledger(ordinal, total, host_is_device=False)
        ledger.free_before_bytes = free_before
        stream = Stream.create(Device(driver))
        super().__init__(driver, stream, ledger, capacity_bytes=total)
        self._described = described
        self.torch_device = torch.device("cuda", ordinal)
        self._torch_memory = TorchMemory(ordinal)
        self._steps = StepSegments(self, self._torch_memory)
        self._cache = StepCache(self._torch_memory, stream=stream.handle, take=self._tensor)
        self._is_vacant = False  # no step can run
        self._graph_pool_bytes = self._graph_driver_bytes = 0
        with torch.cuda.device(ordinal):
            torch.cuda.init()
            self._torch_stream = torch.cuda.ExternalStream(stream.handle, device=self.torch_device)
        self.closing(self._leave_torch)

    @property
    def card(self) -> Card:
        """Of the catalogue where it is known there, with the size that its driver reports."""
        try:
            known = find_card(self.driver.name)
        except InvalidSetting:
            known = generic_card(self.capacity_bytes)
        total = Quantity.exact(self.capacity_bytes, Source.MEASURED, "as the driver reports it")
        return replace(known, total=total, sm=self._described.sm, num_sms=self._described.num_sms)

    @contextmanager
    def active(self) -> Iterator[None]:
        with self.capturing(), self._steps.used():
            yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._torch_stream):
            yield

    def identity(self) -> dict[str, str]:
        return {
            "device": self.driver.name,
            "device_bytes": str(self.capacity_bytes),
            "driver": self.driver.nvml.driver_version() or f"CUDA {cuda_devices().driver_version}",
        }

    def own_bytes(self) -> int | None:
        return self.read("own").own_bytes

    def foreign(self) -> Quantity:
        free, total = self.driver.mem_info()
        own = self.own_bytes() or 0
        return Quantity.exact(
            round_up(max(0, total - free - own), ROUNDING_BYTES),
            Source.MEASURED,
            "the device's total less what is free and what is ours",
        )

    def beyond_accounts_bytes(self) -> int:
        found = self.read("beyond")  # brings torch's account up to date
        return max(0, found.total_bytes - found.free_bytes - self.ledger.accounted_bytes)

    def available_bytes(self) -> int | None:
        return self.driver.mem_info()[0]

    def no_room(self, what: str, *, need_bytes: int, have_bytes: int) -> DoesNotFit:
        remedies = ("end what else runs on it", "raise --keep-free-bytes so that the plan counts on less")
        return no_memory_left(what, "the device", need_bytes=need_bytes, have_bytes=have_bytes, remedies=remedies)

    def read(self, phase: str) -> Reading:
        counted = self._graph_pool_bytes + self._steps.live_bytes
        return take_reading(self.driver, phase=phase, ledger=self.ledger, torch_counted_bytes=counted)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def trim(self) -> None:
        """Nothing: what torch keeps it will want again, and taking it anew stops the device."""

    def drain(self) -> None:
        """Torch gives back what it cached, too, and starts anew: a segment of the wrong size is as good as none. What
        steps have in an arena of ours stays as it is."""
        super().drain()
        torch.cuda.empty_cache()
        self._refill()

    def remember_steps(self) -> None:
        self.driver.device_sync()
        self._cache.remember(self._steps.pool_id)

    def _refill(self) -> None:
        """Segments for steps as they were, unless none runs now; where there is no memory for them, steps may find
        some later."""
        if self._is_vacant:
            return
        with suppress(torch.OutOfMemoryError), self.active():
            self._cache.refill()

    def _tensor(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def settle(self, phase: str) -> None:
        self._steps.poll()
        found = self.read(phase)
        self.peak_own_bytes = max(self.peak_own_bytes or 0, found.own_bytes or 0)
        self.ledger.sample(found)

    def begin_measuring(self) -> None:
        self.driver.device_sync()

    def measured(self, run: Callable[[], object], known: Sequence[torch.Tensor]) -> StepPeak:  # noqa: ARG002
        """By torch's own statistics: a tracker of operations would switch compiled code off."""
        before = torch.cuda.memory_allocated(self.torch_device)
        self.reset_peak()
        run()
        self.driver.device_sync()
        tensors = torch.cuda.max_memory_allocated(self.torch_device) - before
        reserved = torch.cuda.max_memory_reserved(self.torch_device) - self._graph_pool_bytes
        return StepPeak(
            tensor_bytes=round_up(tensors, ROUNDING_BYTES),
            grown_bytes=round_up(reserved + DEFAULT_SLACK_BYTES, ROUNDING_BYTES),
            tensors_told="tensors alive at the peak, by torch's allocator",
            grown_told="all that torch's allocator had reserved by then but for graphs, and the slack it is left with",
        )

    def captured(self, capture: Callable[[], None]) -> Quantity:
        """Their pool is torch's, and told apart from what steps take; the rest is what the driver keeps for them."""
        before_own, before = self.own_bytes() or 0, torch.cuda.memory_reserved(self.torch_device)
        try:
            capture()
        except BaseException:
            self._refill()  # to clear what was captured empties the cache
            raise
        self.driver.device_sync()
        self._graph_pool_bytes = torch.cuda.memory_reserved(self.torch_device) - before
        # What the process holds has torch's pool in it; where the driver does not tell, the pool is all that is known.
        grown = max(self._graph_pool_bytes, (self.own_bytes() or 0) - before_own)
        self._graph_driver_bytes += grown - self._graph_pool_bytes
        self.sampled("graphs", LineKind.GRAPHS).sampled(self._graph_pool_bytes + self._graph_driver_bytes)
        return Quantity.exact(round_up(grown, ROUNDING_BYTES), Source.MEASURED, "growth of the process by captures")

    def dropped(self, clear: Callable[[], None]) -> int:
        """What the driver does not give back with graphs stays theirs: the next ones use it again."""
        before, beyond = self.free_bytes(), self._beyond_torch_bytes()
        clear()
        self.driver.device_sync()
        self._graph_pool_bytes = 0
        given_back = max(0, beyond - self._beyond_torch_bytes())
        self._graph_driver_bytes = max(0, self._graph_driver_bytes - given_back)
        self._refill()
        self.sampled("graphs", LineKind.GRAPHS).sampled(self._graph_driver_bytes)
        return max(0, self.free_bytes() - before)

    def _beyond_torch_bytes(self) -> int:
        """What this process holds and torch did not reserve; 0 where nothing tells."""
        own = self.own_bytes()
        return 0 if own is None else own - torch.cuda.memory_reserved(self.torch_device)

    def release(self, tags: Collection[str]) -> dict[str, int]:
        """With the KV cache goes what torch keeps for steps, in our arena and outside: none runs without it."""
        if KV not in tags:
            return super().release(tags)
        before = self.free_bytes()
        torch.cuda.empty_cache()
        beside = max(0, self.free_bytes() - before) + self._steps.arena_bytes
        try:
            with self._steps.asleep():
                freed = super().release({*tags, *self._steps.tags})
        except DriverError:
            self._is_vacant = True  # some of it may be gone, and all of it counts as asleep
            raise
        except BaseException:
            self._refill()
            raise
        self._is_vacant = True
        return {tag: freed[tag] + beside * (tag == KV) for tag in tags}

    def materialize(self, tags: Collection[str]) -> None:
        """With the KV cache comes what torch had for steps: in our arena, or before anything else, since there may be
        no room for it later."""
        if KV not in tags:
            super().materialize(tags)
            return
        if not self._steps.is_used:
            self._take_cache()
        try:
            super().materialize({*tags, *self._steps.tags})
        except BaseException:
            torch.cuda.empty_cache()
            raise
        self._is_vacant = False
        self._refill()

    def _take_cache(self) -> None:
        """Raises ``CannotMaterialize``."""
        try:
            with self.active():
                self._cache.refill()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            free, total = self.driver.mem_info()
            raise CannotMaterialize(
                size_bytes=self._cache.num_bytes,
                used_bytes=total - free,
                capacity_bytes=total,
                owner="waking what torch keeps for steps",
                detail=f"have {free:,} free; everything still sleeps and nothing was lost: free memory in the other "
                "processes of the device and try again",
            ) from None

    def route_steps(self, *, step_bytes: int, try_out: Callable[[], None]) -> None:
        """What torch cached of the probes goes back first: the arena has that room."""
        self.driver.device_sync()
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved(self.torch_device) - self._graph_pool_bytes
        self._steps.open(step_bytes=step_bytes, kept_bytes=kept, try_out=try_out)

    def close_boundary(self, *, total_bytes: int | None, step_bytes: int) -> tuple[str, ...]:  # noqa: ARG002
        """Torch is held to what it has reserved by now and a slack, the rest of the arena among it."""
        beside = BESIDE_BYTES if self._steps.is_used else DEFAULT_SLACK_BYTES
        boundary = close_boundary(
            self._torch_memory,
            route=self._steps.route,
            segments=self._steps.all,
            slack_bytes=beside + self._steps.headroom_bytes,
        )
        self.closing(lambda: open_boundary(self._torch_memory, boundary))
        return (boundary.paragraph(),)

    def _leave_torch(self) -> None:
        """What torch cached of our work goes back; its context stays, as it is the process's."""
        self.driver.device_sync()
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()
        self.stream.close()

    def _close_driver(self) -> None:
        self.driver.close()


def device_at(ordinal: int) -> CudaDevice:
    """The device of that number. Raises ``InvalidSetting`` where there is none, or nothing to use it with."""
    found = cuda_devices()
    problem = found.reason
    if not problem and not torch.cuda.is_available():
        problem = f"torch {torch.__version__} cannot use it"
    if problem:
        raise InvalidSetting(
            "device", f"cuda:{ordinal}", problem, remedy="run on the host with --device cpu, or install what is missing"
        )
    if ordinal >= len(found.devices):
        raise InvalidSetting(
            "device",
            f"cuda:{ordinal}",
            f"this process sees {len(found.devices)} CUDA devices",
            remedy=f"write cuda:0 to cuda:{len(found.devices) - 1}" if found.devices else "run with --device cpu",
        )
    return found.devices[ordinal]


def _free_before(device: CudaDevice) -> tuple[int | None, list[str]]:
    """What is free, once it stands still, before our context comes: by it, what is ours can be inferred where the
    driver does not tell; None where torch has made the context already. And sentences for the report."""
    nvml = Nvml(device.uuid)

    def free_bytes() -> int | None:
        memory = nvml.memory()
        return None if memory is None else memory.free_bytes

    free, is_stable = wait_until_stable(free_bytes)
    told = [] if is_stable else [RESTLESS]
    return None if torch.cuda.is_initialized() else free, told
