"""Whether the memory of this machine is enough: of all that is to be served, and of a pipeline that changes.

Room at the start ─┬─ check_planned: what is served together ───────────────► findings
                   └─ require_room: the same with one changed ─┐
Room now ─────────────── what it takes beyond what it holds ───┴──────────► refused, or not
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tritone import gpus, memory_plan
from tritone.deploy import Deploy
from tritone.errors import ConfigError
from tritone.finding import Finding, Level, ok, problem
from tritone.gpus import Gpu
from tritone.memory_plan import MemoryPlan, Place, size
from tritone.ram import ram


@dataclass(frozen=True)
class Room:
    """The memory that a machine has and has free, at one moment."""

    gpus: tuple[Gpu, ...]
    ram: Place

    @classmethod
    def now(cls) -> Room:
        return cls(gpus.find(), ram())

    def plan(self, pipelines: Sequence[Deploy]) -> MemoryPlan:
        """Raises ConfigError where a checkpoint does not say what it holds."""
        return memory_plan.plan(pipelines, self.gpus, self.ram)


def check_planned(pipelines: Sequence[Deploy], room: Room) -> list[Finding]:
    """The memory of pipelines that are to be served together; nothing where a checkpoint tells nothing, which
    is said elsewhere.

    room: as it is without them.
    """
    try:
        plan = room.plan(pipelines)
    except ConfigError:
        return []
    there = max(len(room.gpus), gpus.num_gpus())
    missing = [place.name for place in plan.used() if place.number is not None and place.number >= there > 0]
    return [
        *check_memory(plan),
        *(
            problem("gpu", f"{name} is not on this machine, which shows {there}", "name another in `device:`")
            for name in missing
        ),
    ]


def check_memory(plan: MemoryPlan) -> list[Finding]:
    """One finding a place that is to hold something, with the arithmetic where it is too small; and one for
    each share of a place in which its engine could not start."""
    small = plan.too_small()
    found = [
        _too_little(plan, place, f"{place.name} is too small: {plan.summary(place)}", plan.cure(place))
        if place in small
        else ok("memory", f"{place.name}: {plan.summary(place)}")
        for place in plan.used()
    ]
    return found + [_too_little(plan, place, error.what, error.cure) for place, error in plan.too_narrow()]


def _too_little(plan: MemoryPlan, place: Place, what: str, cure: str) -> Finding:
    return Finding(Level.PROBLEM, "memory", what, cure, tuple(plan.table(place)[1:]))


def require_room(served: Sequence[Deploy], new: Deploy, at_start: Room, now: Room) -> None:
    """ConfigError unless a pipeline of a running server has room to be loaded as `new` says.

    served: as they run. What is free now tells little, since what runs takes part of its memory only under
    load. So all that would be served is held against what was free before the server started, as at a start;
    and what the change adds against what is free now, which others may have taken meanwhile.
    """
    name = new.pipeline.name
    others = [deploy for deploy in served if deploy.pipeline.name != name]
    own = [deploy for deploy in served if deploy.pipeline.name == name]
    for finding in check_planned([*others, new], at_start):
        if finding.level is Level.PROBLEM:
            counted = ", counting all that is served, and what was free before the server started"
            raise ConfigError(
                f"{name} cannot be loaded as its deploy file says: {finding.what}"
                f"{counted if finding.subject == 'memory' else ''}",
                finding.cure,
            )
    try:
        wanted, held = now.plan([new]), now.plan(own)
    except ConfigError:
        return  # a checkpoint tells nothing, which is said elsewhere
    for place in wanted.used():
        more = wanted.needed_bytes(place.name) - held.needed_bytes(place.name)
        if place.free_bytes is not None and more > max(0, place.free_bytes):
            raise ConfigError(
                f"{name} cannot be loaded as its deploy file says: on {place.name} it would hold "
                f"{size(more)} more than now, and {size(place.free_bytes)} are free ({place.what})",
                wanted.cure(place),
            )
