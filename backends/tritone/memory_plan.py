"""Whether what is to be served fits into memory, told before anything is started.

    deploys ─► Engine.memory of each stage ─► shares, by place ─┐
    nvidia-smi, /proc, or `memory:` in deploy.yaml ─► places ───┴─► MemoryPlan ─► tables, and what is too much

A place is the RAM of the machine or one GPU. Every engine process on a GPU also takes a context there, and
host memory. Exact terms are the bytes of tensors that an engine keeps; allowances are marked with ~.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tritone.deploy import Deploy
from tritone.engines.memory import Ground, Term
from tritone.errors import ConfigError
from tritone.gpus import Gpu
from tritone.pipeline import Checkpoint

MIB, GIB = 1 << 20, 1 << 30
CPU = "cpu"
PROCESS_BYTES = 350 * MIB  # of RAM: an engine process on a CPU before its weights
GPU_PROCESS_BYTES = 3 * GIB  # of RAM: an engine process on a GPU, with the libraries of CUDA
CONTEXT_BYTES = 1700 * MIB  # of a GPU: a process's context, kernels and workspaces, as seen on an H200
STUB_BYTES = 60 * MIB  # of RAM: the stub of one model instance


@dataclass(frozen=True)
class Place:
    """RAM, or a GPU."""

    name: str  # "cpu" or "gpu:<number>", as deploy files call it
    what: str  # for people
    total_bytes: int | None  # None: nothing says how large it is
    free_bytes: int | None  # of that, as long as nothing of ours runs

    @property
    def number(self) -> int | None:
        """Of a GPU; None: it is RAM."""
        return None if self.name == CPU else int(self.name.partition(":")[2])


@dataclass(frozen=True)
class Share:
    """What one stage, or the server, takes of a place."""

    place: str
    who: str  # pipeline and stage, e.g. "fake singer"
    processes: int
    terms: tuple[Term, ...]  # of one process

    @property
    def num_bytes(self) -> int:
        return self.processes * sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True)
class MemoryPlan:
    """All that is to run, and all that there is."""

    places: tuple[Place, ...]
    shares: tuple[Share, ...]

    def needed_bytes(self, place: str) -> int:
        return sum(share.num_bytes for share in self.shares if share.place == place)

    def used(self) -> Iterator[Place]:
        """The places that something takes a share of."""
        return (place for place in self.places if self.needed_bytes(place.name))

    def too_small(self, before_start: bool = True) -> list[Place]:
        """Places that hold less than is needed; of what is free now, or else of all there is."""
        return [place for place in self.used() if self._lacks(place, before_start)]

    def too_narrow(self) -> list[tuple[Place, ConfigError]]:
        """Shares of GPUs that an engine fills by itself, and in which it could not start: where, and why."""
        return [
            (
                place,
                ConfigError(
                    f"{share.who} has {size(term.num_bytes)} of {place.name} ({term.how}), and "
                    f"{size(term.held_bytes)} must fit into that: "
                    + " and ".join(f"{size(held.num_bytes)} of {held.name}" for held in term.holds),
                    f"raise {term.lower}, lower {term.holds[-1].lower}, "
                    "or name more GPUs in `device` of the stage",
                ),
            )
            for place in self.places
            for share in self.shares
            for term in share.terms
            if share.place == place.name
            and place.total_bytes is not None
            and term.num_bytes < term.held_bytes
        ]

    def summary(self, place: Place) -> str:
        """One line: what is needed and what there is."""
        needed = f"{size(self.needed_bytes(place.name))} planned"
        if place.total_bytes is None:
            return f"{needed}; {place.what}"
        free = "" if place.free_bytes is None else f", {size(place.free_bytes)} free"
        return f"{needed}, {size(place.total_bytes)} in all{free} ({place.what})"

    def cure(self, place: Place) -> str:
        """What to lower, the largest first."""
        options: dict[str, int] = {}
        for share in self.shares:
            if share.place == place.name:
                for term in share.terms:
                    if term.lower:
                        name = f"{term.lower} of {share.who}"
                        options[name] = options.get(name, 0) + share.processes * term.num_bytes
        largest = sorted(options, key=lambda name: options[name], reverse=True)[:3]
        lower = ", ".join(f"{name} ({size(options[name])})" for name in largest)
        way = "move a stage to another device" if place.name != CPU else "free some"
        return f"lower {lower}, or {way}" if lower else f"lower instances, or {way}"

    def table(self, place: Place) -> list[str]:
        """The arithmetic, a line a term."""
        heads, tails = [], []
        last = ""
        for share in self.shares:
            for term in share.terms if share.place == place.name else ():
                if term.num_bytes:
                    times = f"{share.processes} ×" if share.processes > 1 else ""
                    heads.append(("" if share.who == last else share.who, term.name, times))
                    mark = " " if term.is_exact else "~"
                    tails.append(f"{gib(term.num_bytes):>8} GiB {mark} {term.how}")
                    last = share.who
                    for held in term.holds:
                        heads.append(("", f"- {held.name}", times))
                        tails.append(f"{gib(held.num_bytes):>8} GiB   of that: {held.how}")
        heads.append(("sum", "", ""))
        tails.append(f"{gib(self.needed_bytes(place.name)):>8} GiB")
        who, name, times_width = (max(len(head[column]) for head in heads) for column in range(3))
        return [
            f"{place.name}: {self.summary(place)}",
            *(
                f"  {head[0]:<{who}}  {head[1]:<{name}}  {head[2]:>{times_width}} {tail}"
                for head, tail in zip(heads, tails, strict=True)
            ),
        ]

    def require_fit(self, before_start: bool = True) -> None:
        """ConfigError naming the first place, or share of one, that is too small and what to change."""
        for place in self.too_small(before_start):
            raise ConfigError(f"{place.name} is too small: {self.summary(place)}", self.cure(place))
        for _, error in self.too_narrow():
            raise error

    def _lacks(self, place: Place, before_start: bool) -> bool:
        there = place.free_bytes if before_start else place.total_bytes
        return there is not None and self.needed_bytes(place.name) > there


def plan(pipelines: Sequence[Deploy], gpus: Sequence[Gpu], ram: Place) -> MemoryPlan:
    """Of pipelines that are to be served together. gpus: of the machine that is planned for, in order.

    A GPU that a deploy file names and that is not there is a place of unknown size. Raises ConfigError where
    a checkpoint does not say what it holds.
    """
    places = [_overridden(ram, pipelines), *_gpu_places(pipelines, gpus)]
    total = {place.name: place.total_bytes for place in places}
    shares: list[Share] = []
    for deploy in pipelines:
        for stage in deploy.pipeline.stages:
            shares += _stage_shares(deploy, stage.name, [place.name for place in places], total)
        stubs = num_instances(deploy)
        term = Term("stubs", STUB_BYTES, "doors and orchestrators, one a model instance", is_exact=False)
        shares.append(Share(CPU, f"{deploy.pipeline.name} server", stubs, (term,)))
    return MemoryPlan(tuple(places), tuple(shares))


def num_instances(deploy: Deploy) -> int:
    """Model instances of a pipeline: its two pipeline models and those of its stages."""
    return 2 + sum(stage.instances for stage in deploy.stages.values())


def size(num_bytes: int) -> str:
    return f"{gib(num_bytes)} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.3f}" if num_bytes < GIB else f"{num_bytes / GIB:,.1f}"


def _stage_shares(
    deploy: Deploy, stage: str, places: Sequence[str], total: dict[str, int | None]
) -> list[Share]:
    settings, who = deploy.stage(stage), f"{deploy.pipeline.name} {stage}"
    device = settings.placed
    named = [f"gpu:{number}" for number in device.gpus] or [place for place in places if place != CPU]
    hosts = named if device.is_gpu else [CPU]
    leads = deploy.hosted_with(stage)[0] == stage  # the first of its process counts the process itself
    shares = []
    for host in hosts:
        ground = Ground(
            stage=stage,
            checkpoint=deploy.stage_folder(stage),
            is_released=deploy.pipeline.checkpoint is Checkpoint.RELEASED,
            on_gpu=device.is_gpu,
            num_gpus=max(1, len(device.gpus)),
            gpu_bytes=total[host] if device.is_gpu else None,
        )
        own = []
        if deploy.pipeline.checkpoint is not Checkpoint.NONE:
            own = deploy.engine_class(stage).memory(ground, settings.options)
        if leads and device.is_gpu:
            own.append(Term("context", CONTEXT_BYTES, "of a process, with its kernels", is_exact=False))
        if leads and not device.is_gpu:
            own.append(Term("process", PROCESS_BYTES, "an engine before its weights", is_exact=False))
        shares.append(Share(host, who, settings.instances, tuple(own)))
    if leads and device.is_gpu:
        term = Term("process", GPU_PROCESS_BYTES, "host memory of an engine on a GPU", is_exact=False)
        processes = settings.instances * (1 if device.is_spread else len(hosts))
        shares.append(Share(CPU, who, processes, (term,)))
    return shares


def _gpu_places(pipelines: Sequence[Deploy], gpus: Sequence[Gpu]) -> list[Place]:
    """Those of the machine, and those that are only named."""
    given = [deploy.memory.gpu_gib for deploy in pipelines if deploy.memory.gpu_gib is not None]
    stages = [stage.placed for deploy in pipelines for stage in deploy.stages.values()]
    named = max((number + 1 for device in stages for number in device.gpus), default=0)
    if any(device.is_gpu and not device.gpus for device in stages):
        named = max(named, 1)
    places = []
    for number in range(max(named, len(gpus))):
        name = f"gpu:{number}"
        if given:
            num_bytes = int(min(given) * GIB)
            places.append(Place(name, "as `memory.gpu_gib` says", num_bytes, num_bytes))
        elif number < len(gpus):
            gpu = gpus[number]
            places.append(Place(name, gpu.name, gpu.total_bytes, gpu.free_bytes))
        else:
            places.append(Place(name, "not on this machine, so nothing says whether it fits", None, None))
    return places


def _overridden(ram: Place, pipelines: Sequence[Deploy]) -> Place:
    given = [deploy.memory.ram_gib for deploy in pipelines if deploy.memory.ram_gib is not None]
    if not given:
        return ram
    num_bytes = int(min(given) * GIB)
    return Place(CPU, "as `memory.ram_gib` says", num_bytes, num_bytes)
