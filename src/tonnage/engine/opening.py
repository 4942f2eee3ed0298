"""Before the first stage of a start: libraries imported, the device for ourselves alone, then open."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tonnage.buffers.neighbours import runtime_directory
from tonnage.device.host import HostDriver
from tonnage.device.start_lock import start_lock
from tonnage.device.without import WithoutVirtualMemory
from tonnage.engine.host_site import HostSite
from tonnage.engine.site import Site
from tonnage.engine.target import Target
from tonnage.errors import InvalidSetting

#: Why there is no virtual memory where there could be.
NOT_USED = "static_pool says not to use it"


@contextmanager
def starting_alone(target: Target, on_stage: Callable[[str], None]) -> Iterator[tuple[str, ...]]:
    """No other start of this user on the same card inside; yields sentences for the report: why nothing keeps others
    out, if so. A host device is this process's own.

    Raises ``UserError`` when another holds the card's lock for too long, ``InvalidSetting`` for what is no card.
    """
    if target.device_kind == "host":
        yield ()
        return
    from tonnage.engine.cuda_site import device_at

    uuid = device_at(target.rank.device).uuid
    told: tuple[str, ...] = ()
    with ExitStack() as held:
        try:
            held.enter_context(start_lock(uuid, runtime_directory(), on_wait=on_stage))
        except (InvalidSetting, OSError) as error:
            told = (f"nothing kept other engines from starting on {uuid} at the same time: {error}",)
        yield told


def open_site(target: Target, make_driver: Callable[[int], HostDriver]) -> Site:
    """The device that was asked for, with host memory for evicted blocks beside it."""
    options, host_bytes, slab_bytes = target.options, target.options.host_kv_bytes, target.kv.slab_bytes
    if target.device_kind == "host":

        def make(capacity: int) -> Any:
            driver = make_driver(capacity)
            return WithoutVirtualMemory(driver, NOT_USED) if options.static_pool else driver

        return HostSite(
            options.memory_bytes,
            index=target.rank.device,
            make_driver=make,
            host_kv_bytes=host_bytes,
            slab_bytes=slab_bytes,
        )
    from tonnage.engine.cuda_site import CudaSite

    site = CudaSite(target.rank.device, why_static=NOT_USED if options.static_pool else "")
    try:
        if host_bytes:
            site.open_host_pool(asked_bytes=host_bytes, slab_bytes=slab_bytes, also_needed_bytes=0)
    except BaseException:
        site.close()
        raise
    return site


def import_libraries(model_type: str) -> None:
    """Import what the engine will import anyway, so that none of it counts as the engine's memory."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    _ = AutoConfig, AutoModelForCausalLM, AutoTokenizer  # lazy attributes: touching them imports
    module = model_type_to_module_name(model_type)
    importlib.import_module(f"transformers.models.{module}.modeling_{module}")
