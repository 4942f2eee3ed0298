"""All resource managers as one: hooks in dependency order, admission all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from tonnage.config import Limits
from tonnage.errors import ResourceError
from tonnage.resources.base import Deferral, Grant, Refusal, RequestView, ResourceManager, StepOutcome
from tonnage.step import Ints, StepPlan, Txn
from tonnage.terms import Claim


class Dispatcher:
    """Runs each hook over ``managers`` in the order that their ``after`` declares; ties keep the order given.

    ``admit``, ``prepare``, ``committed`` and ``update`` go forward, ``free``, ``reset`` and ``close`` backward. What
    takes stops at the first error, to be rolled back. What follows a fact gives every manager its turn even if one
    raises (the first error is raised at the end): a step is final, or a sequence gone, for all of them or for none.
    Raises ``ResourceError`` for two managers of one name, an unknown name in ``after``, or a cycle.
    """

    def __init__(self, managers: Sequence[ResourceManager]) -> None:
        self.managers = _in_order(managers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(manager.name for manager in self.managers)

    @property
    def may_refuse(self) -> tuple[str, ...]:
        """Managers whose capacity a request is measured by on arrival. The others say at most "not now"."""
        return tuple(manager.name for manager in self.managers if manager.may_refuse)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Managers that nobody asks on arrival: what never fits there is not refused."""
        return tuple(manager.name for manager in self.managers if not manager.may_refuse)

    def claims(self, limits: Limits) -> tuple[Claim, ...]:
        return tuple(claim for manager in self.managers for claim in manager.claims(limits))

    def refusals(self, request: RequestView) -> tuple[Refusal, ...]:
        """Who can never serve the request. Empty: it fits once enough others have finished."""
        needs = ((manager, manager.lifetime_need(request)) for manager in self.managers if manager.may_refuse)
        return tuple(
            Refusal(manager=manager.name, unit=manager.unit, need=need, have=manager.capacity())
            for manager, need in needs
            if need > manager.capacity()
        )

    def admit(self, request: RequestView, txn: Txn | None = None) -> Mapping[str, Grant] | Deferral:
        """Every manager's grant by name, or the first deferral, with what earlier managers took given back.

        With ``txn`` (a step's) its rollback takes the admission back as well; without, the admission is final.
        """
        own = Txn()
        try:
            answer = self._admit_all(request, own)
        except BaseException:
            own.rollback()
            raise
        if isinstance(answer, Deferral):
            own.rollback()
        elif txn is not None:
            txn.undo(own.rollback)
        else:
            own.commit()
        return answer

    def short_of(self, request_ids: Sequence[str], ends: Ints) -> Deferral | None:
        """Who lacks units for a step that computes each of these admitted requests up to ``ends``; None: nobody.

        The first manager that is short: ``need`` units are missing, ``have`` are available. Takes nothing.
        """
        for manager in self.managers:
            if missing := manager.short_of(request_ids, ends):
                have, held_back = manager.available(), manager.held_back()
                return Deferral(manager=manager.name, need=missing, have=have, held_back=held_back, unit=manager.unit)
        return None

    @contextmanager
    def holding(self, requests: Iterable[RequestView]) -> Iterator[None]:
        """Admit probe requests and free them on the way out, whatever happens; a deferral is a ``ResourceError``.

        Each is freed even if freeing another raises. Such an error comes before one of the block: what a probe leaves
        behind is missing for ever.
        """
        admitted = Txn()
        try:
            for request in requests:
                if isinstance(no := self.admit(request), Deferral):
                    raise ResourceError(f"probe {request.id!r} needs {no.need} of {no.manager}, which has {no.have}")
                admitted.undo(partial(self.free, request.id))
            yield
        finally:
            admitted.rollback()

    def prepare(self, plan: StepPlan, txn: Txn) -> None:
        """Raises what a manager raises; the caller rolls ``txn`` back, which undoes the managers before it."""
        for manager in self.managers:
            manager.prepare(plan, txn)

    def committed(self) -> None:
        """The transaction is final: every manager begins what cannot be undone."""
        self._forward(lambda manager: manager.committed())

    def loading(self) -> frozenset[str]:
        """Admitted requests for which some manager still waits; between steps only."""
        return frozenset().union(*(manager.loading() for manager in self.managers))

    def wait_loaded(self) -> None:
        """Until one of ``loading`` is nearer to run, whoever holds it back."""
        for manager in self.managers:
            manager.wait_loaded()

    def update(self, plan: StepPlan, outcome: StepOutcome | None) -> None:
        """Of the step that finished, one behind those that are prepared under overlap; None: nothing was sampled."""
        self._forward(lambda manager: manager.update(plan, outcome))

    def free(self, request_id: str, *, keep_cached: bool = True) -> None:
        self._backward(lambda manager: manager.free(request_id, keep_cached=keep_cached))

    def reset(self) -> None:
        self._backward(lambda manager: manager.reset())

    def close(self) -> None:
        self._backward(lambda manager: manager.close())

    def stats(self) -> dict[str, int]:
        """Each manager's counts under ``NAME.KEY``."""
        return {f"{m.name}.{key}": value for m in self.managers for key, value in m.stats().items()}

    def _admit_all(self, request: RequestView, txn: Txn) -> Mapping[str, Grant] | Deferral:
        grants: dict[str, Grant] = {}
        for manager in self.managers:
            answer = manager.admit(request, txn)
            if isinstance(answer, Deferral):
                return answer
            grants[manager.name] = answer
        return grants

    def _backward(self, call: Callable[[ResourceManager], object]) -> None:
        # An undo list does just this: newest first, and an error does not rob the others of their turn.
        turns = Txn()
        for manager in self.managers:
            turns.undo(partial(call, manager))
        turns.rollback()

    def _forward(self, call: Callable[[ResourceManager], None]) -> None:
        first: Exception | None = None
        for manager in self.managers:
            try:
                call(manager)
            except Exception as error:  # noqa: BLE001 - as in an undo list
                first = first or error
        if first is not None:
            raise first


def _in_order(managers: Sequence[ResourceManager]) -> tuple[ResourceManager, ...]:
    names = [manager.name for manager in managers]
    if len(set(names)) != len(names):
        raise ResourceError(f"two resource managers share a name: {', '.join(names)}")
    for manager in managers:
        if unknown := manager.after - set(names):
            raise ResourceError(f"manager {manager.name!r} comes after {', '.join(sorted(unknown))}, which nobody is")
    ordered: list[ResourceManager] = []
    waiting = list(managers)
    while waiting:
        placed = {manager.name for manager in ordered}
        ready = next((manager for manager in waiting if manager.after <= placed), None)
        if ready is None:
            raise ResourceError(f"managers wait for each other: {', '.join(manager.name for manager in waiting)}")
        ordered.append(ready)
        waiting.remove(ready)
    return tuple(ordered)
