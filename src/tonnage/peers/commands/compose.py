"""Compose files: each service that starts an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tonnage.errors import InputError
from tonnage.peers.commands.command import Command, Place
from tonnage.peers.commands.docker import DEFAULT_SHM_BYTES, size_of, with_gpus
from tonnage.peers.commands.documents import mapping, sequence
from tonnage.peers.commands.invocation import container_launches
from tonnage.peers.commands.shell import Word, filled, simple_commands


def is_compose(document: object) -> bool:
    """Whether the document is a compose file."""
    return isinstance(document, Mapping) and isinstance(document.get("services"), Mapping)


def launches(document: Mapping[str, Any], variables: Mapping[str, str]) -> list[Command]:
    """The engines of all services, in order. ``variables``: values for ``${...}`` in the file."""
    found = []
    for name, service in mapping(document.get("services")).items():
        service = mapping(service)
        found += container_launches(_words(service, variables), _place(service, variables), f"service {name}")
    return found


def _words(service: Mapping[str, Any], variables: Mapping[str, str]) -> list[Word]:
    """Entry point and command. In a list each item is a word; a text is cut as a shell does."""
    found: list[Word] = []
    for key in ("entrypoint", "command"):
        value = service.get(key)
        if isinstance(value, list):
            found += [_interpolated(str(item), variables) for item in value]
        elif isinstance(value, str):
            found += _cut(value, variables)
    return found


def _cut(text: str, variables: Mapping[str, str]) -> list[Word]:
    """As a shell cuts it, on however many lines it stands: a folded text has line ends that mean nothing."""
    one_line = " ".join(text.replace("\\\n", " ").split("\n")).replace("$$", "\0")
    try:
        found = simple_commands(one_line, variables)
    except InputError as fault:
        raise InputError(f"a command cannot be cut into words: {fault.what}", remedy=fault.remedy) from None
    return [replace(word, text=word.text.replace("\0", "$")) for simple in found for word in simple.words]


def _interpolated(text: str, variables: Mapping[str, str]) -> Word:
    word = filled(text.replace("$$", "\0"), variables)
    return replace(word, text=word.text.replace("\0", "$"))


def _place(service: Mapping[str, Any], variables: Mapping[str, str]) -> Place:
    image = service.get("image")
    shm = service.get("shm_size")
    is_host = service.get("ipc") == "host"
    place = Place(
        image=None if image is None else _interpolated(str(image), variables).text,
        shm_bytes=None if is_host else DEFAULT_SHM_BYTES if shm is None else size_of(_text(shm, variables)),
        is_host_shm=is_host,
        variables=_environment(service.get("environment"), variables),
    )
    return _devices(service, place, variables)


def _text(value: object, variables: Mapping[str, str]) -> str:
    return _interpolated(str(value), variables).text


def _environment(value: object, variables: Mapping[str, str]) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {
            str(name): variables.get(str(name), "") if text is None else _text(text, variables)
            for name, text in value.items()
        }
    pairs = (_text(item, variables).partition("=") for item in sequence(value))
    return {name: text if equals else variables.get(name, "") for name, equals, text in pairs}


def _devices(service: Mapping[str, Any], place: Place, variables: Mapping[str, str]) -> Place:
    """``deploy.resources.reservations.devices``, or ``gpus``."""
    resources = mapping(mapping(service.get("deploy")).get("resources"))
    asked = sequence(mapping(resources.get("reservations")).get("devices"))
    if service.get("gpus") is not None:
        asked = [*asked, *(sequence(service["gpus"]) or [{"count": service["gpus"]}])]
    for device in asked:
        device = mapping(device)
        ids = sequence(device.get("device_ids"))
        if ids:
            names = tuple(_text(each, variables) for each in ids)
            place = replace(place, devices=names, num_gpus=len(names))
        elif device.get("count") is not None:
            place = with_gpus(place, _text(device["count"], variables))
    return place
