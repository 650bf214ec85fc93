"""What the commands that run a server do, each with its parsed arguments; what it returns is the exit status.

A command raises TritoneError with what the user is told when it cannot be done.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import sys
from pathlib import Path

from tritone import allocator, deploy_file, deploy_reader, pbtxt, pipelines, profiling, repository, wire
from tritone import server as servers
from tritone.asked import Asked, ServeOptions
from tritone.chain import chain
from tritone.deploy import Deploy
from tritone.doctor import examine
from tritone.errors import ConfigError
from tritone.finding import Level, worst
from tritone.pipeline import Checkpoint
from tritone.room import Room
from tritone.server import Interpreter, Listen

CERTIFICATES = {
    "root_certificates": "whom to trust when the server is asked how it is, where it uses TLS",
    "private_key": "to ask a server with mutual TLS how it is",
    "certificate_chain": "of that key",
}


def _listen(args: argparse.Namespace) -> Listen:
    health = getattr(args, "health_port", None)
    if health is None:
        health = 0 if args.metrics_port == 0 else args.metrics_port % 65535 + 1
    return Listen(args.host, args.http_port, args.grpc_port, args.metrics_port, health)


def _say(line: str) -> None:
    print(line, flush=True)


def _say_if_heard(line: str) -> None:
    """For a command that must clean up even when its terminal is gone."""
    with contextlib.suppress(OSError):
        _say(line)


def serve(args: argparse.Namespace) -> int:
    from tritone import serve as serving

    if getattr(args, "arguments", None) == sys.argv[1:]:  # else it is a part of another program
        allocator.start_again()
    allocator.for_this_process()
    options = ServeOptions(
        targets=tuple(args.targets),
        overrides=_overrides(args),
        profiles=tuple(args.profiles),
        listen=_listen(args),
        run_folder=args.run_dir,
        log=args.log,
        load_timeout_s=args.load_timeout_s,
        drain_s=args.drain_s,
        open_admin=args.open_admin,
        check_only=args.check,
        extra=tuple(args.extra),
        certificates=_certificates(args),
    )
    asked = Asked()
    asked.listen()
    allocator.give_back_often()
    return serving.serve(options, _say_if_heard, asked)


def _overrides(args: argparse.Namespace) -> tuple[str, ...]:
    """Those of --set and --checkpoint, for one pipeline or several."""
    if not args.checkpoint:
        return tuple(args.overrides)
    if len(args.targets) != 1:
        raise ConfigError(
            f"--checkpoint is given for {len(args.targets)} pipelines",
            "give --set PIPELINE:checkpoint=DIR for each",
        )
    return (*args.overrides, _checkpoint_override(args.checkpoint))


def plan(args: argparse.Namespace) -> int:
    from tritone.serve import load_pipelines

    given = {"gpu_gib": args.gpu_gib, "ram_gib": args.ram_gib}
    sizes = [f"memory.{name}={value}" for name, value in given.items() if value is not None]
    found = load_pipelines(args.targets, (*_overrides(args), *sizes), args.profiles)
    planned = Room.now().plan(found)
    for place in planned.used():
        for line in planned.table(place):
            _say(line)
    planned.require_fit()
    return 0


def reload(args: argparse.Namespace) -> int:
    from tritone.desk import ask_reload

    _say(ask_reload(args.pipeline, args.pid))
    return 0


def profile(args: argparse.Namespace) -> int:
    from tritone.desk import ask_profile

    order = wire.Profile(
        pipeline=args.pipeline,
        stage=args.stage,
        kind=args.kind,
        form=profiling.form_of(args.out),
        seconds=args.seconds,
        instance=args.instance,
        door=args.door,
    )
    profiling.check(order)
    with profiling.replacing(args.out) as file:
        profiled = ask_profile(order, args.pid)
        packed = order.kind == "torch" and order.form == "json"
        file.write(gzip.decompress(profiled.data) if packed else profiled.data)
    _say(f"{args.out}: {profiled.said}")
    return 0


def _certificates(args: argparse.Namespace) -> dict[str, str]:
    """The files with which `serve` gets through the TLS of its own server."""
    given = {name: getattr(args, name) for name in CERTIFICATES if getattr(args, name)}
    if servers.uses_tls(args.extra, mutual=True) and not {"private_key", "certificate_chain"} <= set(given):
        raise ConfigError(
            "the server is to ask its clients for certificates, and `tritone serve` is one of them",
            "give it --private-key and --certificate-chain",
        )
    return given


def render(args: argparse.Namespace) -> int:
    source = repository.find(args.target)
    overrides = list(args.overrides)
    if args.checkpoint:
        overrides.append(_checkpoint_override(args.checkpoint))
    profile = args.profiles[-1] if args.profiles else None
    deploy = deploy_reader.load(source / repository.DEPLOY, overrides, profile)
    folder = args.out or source
    if (args.overrides or profile) and folder.resolve() == source.resolve():
        option = "--set" if args.overrides else "--profile"
        raise ConfigError(
            f"{option} changes what is rendered, but not deploy.yaml", "edit deploy.yaml, or give --out"
        )
    _require_fit(deploy)
    if args.checkpoint:
        _require_checkpoint(deploy)
        if folder.resolve() == source.resolve():
            deploy_file.set_value(source / repository.DEPLOY, "checkpoint", str(deploy.checkpoint))
    present = folder / repository.DEPLOY
    if folder.resolve() != source.resolve() and present.exists():
        if not args.overwrite and deploy_reader.load(present).digest != deploy.digest:
            raise ConfigError(f"{present} has other settings", "give --overwrite, or another --out")
        present.unlink()
    for file in pbtxt.write(deploy, folder):
        _say(str(file))
    for name in repository.strangers(deploy, folder):
        _say(f"warning: {folder / name} is no model of the pipeline, and Triton would load it; remove it")
    if deploy.mps:
        _say(
            f"warning: {present} says mps: true, which `tritone serve` alone heeds: serve the folder with "
            "it, or start nvidia-cuda-mps-control before plain tritonserver (model_repository/ONE_GPU.md)"
        )
    return 0


def _require_fit(deploy: Deploy) -> None:
    """ConfigError if it could never be served here, or on the machine that `memory:` describes."""
    try:
        planned = Room.now().plan([deploy])
    except ConfigError:
        return  # the checkpoint is not here yet, or not whole
    if any(place.total_bytes is None for place in planned.used()):
        return  # it is rendered for another machine, of which nothing is known
    narrow = [place for place, _ in planned.too_narrow()]
    for place in [*planned.too_small(before_start=False), *narrow]:
        for line in planned.table(place):
            _say(line)
    planned.require_fit(before_start=False)


def _checkpoint_override(folder: Path) -> str:
    return f"checkpoint={json.dumps(str(folder.expanduser().absolute()))}"


def _require_checkpoint(deploy: Deploy) -> None:
    """Raise ConfigError unless the checkpoint fits the pipeline."""
    if deploy.pipeline.checkpoint is Checkpoint.NONE:
        raise ConfigError(f"pipeline '{deploy.pipeline.name}' has no checkpoint", "leave out --checkpoint")
    for stage in deploy.pipeline.stages:
        deploy.require_checkpoint(stage.name)
    deploy.pipeline.facts(deploy.checkpoint)


def check(args: argparse.Namespace) -> int:
    targets = args.targets or [
        str(folder) for place in repository.shelves()[:1] for folder in repository.below(place)
    ]
    if not targets:
        raise ConfigError(f"there are no pipelines in '{repository.FOLDER}'", "name a pipeline or its folder")
    status = 0
    for target in targets:
        folder = repository.find(target)
        deploy = deploy_reader.load(folder / repository.DEPLOY, args.overrides)
        for line in chain(deploy, folder):
            _say(line)
        stale = [] if args.overrides else repository.stale(deploy, folder)
        if stale:
            _say(f"  not rendered from this file: {', '.join(stale)}; run `tritone render {target}`")
            status = 1
    return status


def doctor(args: argparse.Namespace) -> int:
    findings = []
    for finding in examine(args.model_repository, _listen(args)):
        _say(str(finding))
        findings.append(finding)
    return 1 if worst(findings) is Level.PROBLEM else 0


def models(_: argparse.Namespace) -> int:
    names = pipelines.names()
    width = max(map(len, names), default=0)
    for name in names:
        pipeline = pipelines.get(name)
        stages = ", ".join(stage.name for stage in pipeline.stages)
        profiles = ", ".join(pipelines.profiles(name))
        offered = f"; profiles: {profiles}" if profiles else ""
        _say(f"{name:<{width}}  {pipeline.doc} ({stages} -> {', '.join(pipeline.modalities)}){offered}")
    return 0


def backends(args: argparse.Namespace) -> int:
    python = Interpreter.current()
    server = servers.find(python=python)
    folders = [repository.find(target) for target in args.targets]
    folder = servers.compose(server, args.folder)
    loaded = [deploy_reader.load(place / repository.DEPLOY) for place in folders]
    words = servers.command(
        server,
        folders or [Path("MODEL_REPOSITORY")],
        folder,
        _listen(args),
        threads=servers.pool_threads(loaded),
    )
    print(f"composed {folder.resolve()} for {server}", file=sys.stderr)
    if not folders:
        print("put the folder of a rendered pipeline for MODEL_REPOSITORY", file=sys.stderr)
    _say(servers.shell_line(servers.search_paths(server, python), words))
    return 0
