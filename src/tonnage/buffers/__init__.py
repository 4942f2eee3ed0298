"""Owned memory: single buffers, virtual memory that sleeps, arenas that grow in place, and torch tensors over them.

Nothing here imports torch: ``torch_view`` and the ``torch_`` modules, which need it, are asked for by their own names.
"""

from tonnage.buffers.allocation import VirtualAllocation
from tonnage.buffers.arena import VaArena
from tonnage.buffers.backing import Retain
from tonnage.buffers.batch import Released, Wake
from tonnage.buffers.buffer import Buffer
from tonnage.buffers.device import Device
from tonnage.buffers.fences import Fences, Mark
from tonnage.buffers.give_back import GivenBack, give_back, take_back
from tonnage.buffers.graph_ranges import Capture, GraphRanges, Registration
from tonnage.buffers.group import Group, ThreadGroup
from tonnage.buffers.manager import BufferManager, BufferStats
from tonnage.buffers.memory import Exports, Memory
from tonnage.buffers.neighbours import Lender, ask
from tonnage.buffers.nvls import NvlsBuffer, NvlsPart, NvlsView
from tonnage.buffers.pinned_pool import PinnedPool, PinnedStats
from tonnage.buffers.pool import DevicePool
from tonnage.buffers.pressure import Pressure, Relief
from tonnage.buffers.registry import Leftover
from tonnage.buffers.restore import Restore
from tonnage.buffers.scopes import ScopeConfig, pop_vm, preserve_contents, push_vm, scope
from tonnage.buffers.stable import StableBuffer
from tonnage.buffers.stream import Stream
from tonnage.buffers.virtual import VirtualMemory

__all__ = [
    "Buffer",
    "BufferManager",
    "BufferStats",
    "Capture",
    "Device",
    "DevicePool",
    "Exports",
    "Fences",
    "GivenBack",
    "GraphRanges",
    "Group",
    "Leftover",
    "Lender",
    "Mark",
    "Memory",
    "NvlsBuffer",
    "NvlsPart",
    "NvlsView",
    "PinnedPool",
    "PinnedStats",
    "Pressure",
    "Registration",
    "Released",
    "Relief",
    "Restore",
    "Retain",
    "ScopeConfig",
    "StableBuffer",
    "Stream",
    "ThreadGroup",
    "VaArena",
    "VirtualAllocation",
    "VirtualMemory",
    "Wake",
    "ask",
    "give_back",
    "pop_vm",
    "preserve_contents",
    "push_vm",
    "scope",
    "take_back",
]
