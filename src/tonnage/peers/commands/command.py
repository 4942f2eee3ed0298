"""A start of an engine as somebody wrote it down: its flags as typed, and the place that it is given to run in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tonnage.peers.commands.shell import Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of a command line.

    name     with underscores and without dashes, aliases resolved: "tensor_parallel_size"
    written  as it was typed: "-tp", "--tensor-parallel-size", or a key of an options file
    text     its value as typed; None: it stood alone
    is_off   it was written as --no-...
    unknown  names of shell variables in its value that nothing gives a value to
    """

    name: str
    written: str
    text: str | None = None
    is_off: bool = False
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a container or a shell gives to a process. None: the file does not say.

    image       of the container
    num_gpus    devices that it may use
    gpu_name    as a node selector writes it ("NVIDIA-H100-80GB-HBM3")
    devices     ids of the devices where they are named, as typed
    shm_bytes   size of /dev/shm; ``is_host_shm``: that of the host, whatever it is
    variables   environment of the process
    """

    image: str | None = None
    num_gpus: int | None = None
    gpu_name: str | None = None
    devices: tuple[str, ...] = ()
    shm_bytes: int | None = None
    is_host_shm: bool = False
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One engine started once.

    engine   "vllm", "sglang" or "trtllm"
    version  as the image's tag or a pin in the command says it; None: nothing says it
    model    as typed; None where none is named
    where    the place in its file, for messages: "line 3", "service llm"
    unknown  shell variables in the model's name that nothing gives a value to
    files    options files that the command names and that were read
    open_words  those that are neither flags nor the model, and hold variables without a value: "$EXTRA_ARGS"
    lost     flags that stand on the lines behind the command, which ended before them
    """

    engine: str
    version: str | None = None
    model: str | None = None
    flags: tuple[Flag, ...] = ()
    place: Place = field(default_factory=Place)
    where: str = ""
    unknown: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    open_words: tuple[Word, ...] = ()
    lost: tuple[str, ...] = ()

    def flag(self, name: str) -> Flag | None:
        """The last flag of that name, which is the one that counts."""
        return next((flag for flag in reversed(self.flags) if flag.name == name), None)

    def text(self, *names: str) -> str | None:
        """The value of the first of these flags that is given with one."""
        for name in names:
            flag = self.flag(name)
            if flag is not None and flag.text is not None:
                return flag.text
        return None
