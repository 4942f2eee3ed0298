"""Launches of engines as people write them down: commands, compose files, manifests. Read, never run."""

from tonnage.peers.commands.command import Command, Flag, Place
from tonnage.peers.commands.files import commands_in
from tonnage.peers.commands.values import settings_of

__all__ = ["Command", "Flag", "Place", "commands_in", "settings_of"]
