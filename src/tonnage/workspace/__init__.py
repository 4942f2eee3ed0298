"""Scratch memory of attention backends, served within what they declared."""

from tonnage.workspace.arena import ScratchArena, StepScratch

__all__ = ["ScratchArena", "StepScratch"]
