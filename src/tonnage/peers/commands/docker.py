"""``docker run`` as a place for an engine: image, devices, shared memory, environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tonnage.errors import InvalidSetting
from tonnage.peers.commands.command import Place
from tonnage.peers.commands.known import words_of
from tonnage.peers.commands.shell import Word
from tonnage.units import KiB, MiB

#: What a container gets as /dev/shm where nothing else is said: the default of Docker and of Kubernetes.
DEFAULT_SHM_BYTES = 64 * MiB
_RUNTIMES = ("docker", "podman", "nerdctl")
#: Options of ``run`` that stand alone; every other one takes a value.
_ALONE = words_of(
    "-d --detach -i --interactive -t --tty -it -ti -dit -itd -P --publish-all --rm --privileged --init --read-only "
    "--no-healthcheck --oom-kill-disable --sig-proxy -q --quiet -id -di -dt -td"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE)


def run_of(texts: Sequence[str]) -> int | None:
    """Where the options of ``docker run`` begin; None where the words are none."""
    for at, text in enumerate(texts[:-1]):
        if text.rsplit("/", 1)[-1] in _RUNTIMES:
            for after in range(at + 1, min(at + 4, len(texts))):
                if texts[after] in ("run", "create"):
                    return after + 1
            return None
    return None


def container(words: Sequence[Word], start: int, outside: Place) -> tuple[list[Word], Place]:
    """The words that the container is given, and the place that it is. ``start``: first word behind ``run``.

    What ``outside`` knows of the shell's environment reaches the container by ``-e NAME`` alone."""
    place, entry, at = replace(outside, variables={}, is_host_shm=False, shm_bytes=DEFAULT_SHM_BYTES), None, start
    while at < len(words) and words[at].text.startswith("-"):
        name, equals, value = words[at].text.partition("=")
        if name == "--":
            at += 1
            break
        takes = not equals and name not in _ALONE and not re.fullmatch(r"-[ditP]+", name)
        if takes:
            value = words[at + 1].text if at + 1 < len(words) else ""
        at += 1 + takes
        if name == "--entrypoint":
            entry = value
        else:
            place = _with(place, name, value, outside)
    image = words[at].text if at < len(words) else None
    inner = list(words[at + 1 :])
    if entry:
        inner = [*(Word(part) for part in entry.split()), *inner]
    return inner, replace(place, image=image)


def _with(place: Place, name: str, value: str, outside: Place) -> Place:
    if name == "--gpus":
        return with_gpus(place, value)
    if name == "--shm-size":
        return replace(place, shm_bytes=size_of(value))
    if name == "--ipc" and value == "host":
        return replace(place, is_host_shm=True, shm_bytes=None)
    if name == "--device" and value.startswith("nvidia.com/gpu="):
        return with_gpus(place, value.partition("=")[2])
    if name in ("-e", "--env"):
        key, equals, text = value.partition("=")
        found = text if equals else outside.variables.get(key)
        return place if found is None else replace(place, variables={**place.variables, key: found})
    return place


def with_gpus(place: Place, text: str) -> Place:
    """``all``, a number, ``device=0,1`` or a list of ids, with the quotes that a shell leaves."""
    plain = text.strip().strip("\"'")
    for part in plain.split(",") if "device=" not in plain else [plain]:
        key, equals, value = part.partition("=")
        if key == "device" and equals:
            ids = tuple(each for each in re.split(r"[,\s]+", value.strip("\"'")) if each)
            return replace(place, devices=ids, num_gpus=len(ids))
        number = value if key == "count" else part
        if number.isdecimal() and len(number) < 5:
            return replace(place, num_gpus=int(number))
    return place


def size_of(text: str) -> int | None:
    """A size as Docker writes it: 16g is 16 GiB. None for what is none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or len(text) > 40:
        return None
    power = "bkmgt".index(found[2].lower()) if found[2] else 0
    try:
        return int(float(found[1]) * KiB**power)
    except (OverflowError, InvalidSetting):
        return None
