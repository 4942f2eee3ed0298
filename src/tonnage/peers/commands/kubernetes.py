"""Kubernetes manifests: each container that starts an engine, in whatever kind of object it stands."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tonnage.peers.commands.command import Command, Place
from tonnage.peers.commands.docker import DEFAULT_SHM_BYTES
from tonnage.peers.commands.documents import mapping, sequence
from tonnage.peers.commands.invocation import container_launches
from tonnage.peers.commands.shell import Room, Word

#: Labels that nodes carry the name of their card in.
_PRODUCT_LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name")
_GPUS = "nvidia.com/gpu"
_SUFFIXES = {
    "": 1, "k": 1000, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip


def is_manifest(document: object) -> bool:
    """Whether the document is an object of Kubernetes."""
    return isinstance(document, Mapping) and "kind" in document and ("apiVersion" in document or "spec" in document)


def launches(document: Mapping[str, Any]) -> list[Command]:
    """The engines of all containers, in order."""
    found = []
    for each in _objects(document):
        name = f"{each.get('kind')} {mapping(each.get('metadata')).get('name', '?')}"
        pods = _group_size(each)
        for pod in _pods(each):
            for container in sequence(pod.get("containers")):
                container = mapping(container)
                where = f"{name}, container {container.get('name', '?')}"
                found += container_launches(_words(container), _place(container, pod, pods), where)
    return found


def _group_size(document: Mapping[str, Any]) -> int:
    """Pods that serve one model together: the leader and the workers of a LeaderWorkerSet."""
    size = mapping(mapping(document.get("spec")).get("leaderWorkerTemplate")).get("size")
    return size if isinstance(size, int) and 1 < size < 10_000 else 1


def config_files(document: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a ConfigMap by their keys, which are the names of the files that they become."""
    found = {}
    for each in _objects(document):
        if each.get("kind") == "ConfigMap":
            found.update({name: text for name, text in mapping(each.get("data")).items() if isinstance(text, str)})
    return found


def _objects(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if document.get("kind") == "List":
        yield from (mapping(item) for item in sequence(document.get("items")))
    else:
        yield document


def _pods(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every mapping with containers: the specification of a pod, however deep."""
    stack: deque[tuple[object, int]] = deque([(document, 0)])
    while stack:
        value, depth = stack.popleft()
        if depth > 12:
            continue
        if isinstance(value, Mapping):
            if isinstance(value.get("containers"), list):
                yield mapping(value)
            stack += [(inside, depth + 1) for inside in value.values()]
        elif isinstance(value, list):
            stack += [(inside, depth + 1) for inside in value]


def _words(container: Mapping[str, Any]) -> list[Word]:
    """Command and arguments with ``$(NAME)`` replaced by the container's own environment."""
    variables = _environment(container)
    words = [*sequence(container.get("command")), *sequence(container.get("args"))]
    room = Room()
    return [_replaced(str(word), variables, room) for word in words]


def _replaced(text: str, variables: Mapping[str, str], room: Room) -> Word:
    unknown: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        if match[1] in variables:
            return room.take(variables[match[1]])
        unknown.append(match[1])
        return match[0]

    return Word(re.sub(r"\$?\$\(([A-Za-z_][\w.-]*)\)", value, text), tuple(unknown))


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Variables with a value of their own; those from secrets and fields have none here."""
    pairs = [mapping(item) for item in sequence(container.get("env"))]
    return {str(pair.get("name")): str(pair["value"]) for pair in pairs if pair.get("value") is not None}


def _place(container: Mapping[str, Any], pod: Mapping[str, Any], pods: int) -> Place:
    resources = mapping(container.get("resources"))
    asked = mapping(resources.get("limits")).get(_GPUS, mapping(resources.get("requests")).get(_GPUS))
    image = container.get("image")
    count = str(asked) if asked is not None else ""
    place = Place(
        image=None if image is None else str(image),
        num_gpus=int(count) * pods if count.isdecimal() and len(count) < 5 else None,
        gpu_name=_product(pod),
        variables=_environment(container),
    )
    return _with_shm(place, container, pod)


def _with_shm(place: Place, container: Mapping[str, Any], pod: Mapping[str, Any]) -> Place:
    """The volume in memory that is mounted at /dev/shm; without one it is the default."""
    if pod.get("hostIPC") is True:
        return replace(place, is_host_shm=True)
    mounted = [mapping(each) for each in sequence(container.get("volumeMounts"))]
    names = {each.get("name") for each in mounted if str(each.get("mountPath", "")).rstrip("/") == "/dev/shm"}
    for volume in (mapping(each) for each in sequence(pod.get("volumes"))):
        if volume.get("name") in names:
            limit = mapping(volume.get("emptyDir")).get("sizeLimit")
            if limit is None:  # as large as the pod's memory
                return replace(place, is_host_shm=True)
            return replace(place, shm_bytes=size_of(str(limit)))
    return replace(place, shm_bytes=DEFAULT_SHM_BYTES)


def size_of(text: str) -> int | None:
    """A quantity as Kubernetes writes it: 16Gi, 8G, 1048576. None for what is none."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-zA-Z]{0,2})", text.strip())
    if found is None or found[2].lower() not in _SUFFIXES:
        return None
    return int(float(found[1]) * _SUFFIXES[found[2].lower()])


def _product(pod: Mapping[str, Any]) -> str | None:
    selector = mapping(pod.get("nodeSelector"))
    for label in _PRODUCT_LABELS:
        if selector.get(label):
            return str(selector[label])
    affinity = mapping(mapping(pod.get("affinity")).get("nodeAffinity"))
    required = mapping(affinity.get("requiredDuringSchedulingIgnoredDuringExecution"))
    for term in sequence(required.get("nodeSelectorTerms")):
        for rule in (mapping(each) for each in sequence(mapping(term).get("matchExpressions"))):
            values = sequence(rule.get("values"))
            if rule.get("key") in _PRODUCT_LABELS and rule.get("operator") == "In" and values:
                return str(values[0])
    return None
