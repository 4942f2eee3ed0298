"""Owned memory: single buffers, arenas that grow in place, and torch tensors over them (``torch_view``)."""

from tonnage.buffers.arena import VaArena
from tonnage.buffers.device import Device
from tonnage.buffers.manager import Buffer, BufferManager
from tonnage.buffers.memory import Memory
from tonnage.buffers.stream import Stream

__all__ = ["Buffer", "BufferManager", "Device", "Memory", "Stream", "VaArena"]
