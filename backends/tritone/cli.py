"""The commands of `tritone` that run a server: serve, reload, profile, render, check, doctor, models and
backends.

Each gets `run`, a function of the parsed arguments that returns the exit status: 0, or 1 with one sentence
on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritone import deploy as deploys
from tritone import deploy_file, doctor, gpus, memory_plan, pbtxt, pipelines, profiling, repository, wire
from tritone import server as servers
from tritone.asked import DRAIN_S, Asked, ServeOptions
from tritone.chain import chain
from tritone.deploy import Deploy
from tritone.errors import ConfigError, TritoneError
from tritone.finding import Level, worst
from tritone.pipeline import Checkpoint
from tritone.ram import ram
from tritone.server import Interpreter, Listen

CERTIFICATES = {
    "root_certificates": "whom to trust when the server is asked how it is, where it uses TLS",
    "private_key": "to ask a server with mutual TLS how it is",
    "certificate_chain": "of that key",
}


def add_commands(commands: Any) -> None:
    """Add the commands to an argparse subparsers object."""
    target = {"metavar": "PIPELINE", "help": "its name, or a folder with a deploy.yaml"}
    override = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    checkpoint = {"metavar": "DIR", "help": "its weights; default: what deploy.yaml says, else the cache"}

    parser = commands.add_parser(
        "serve",
        help="start a Triton server with pipelines",
        description="Render and check pipelines, start a Triton server with them, and watch it until Ctrl-C.",
        epilog="Options for the server itself may follow `--`, e.g. -- --log-verbose=1",
    )
    parser.add_argument("targets", nargs="+", **target)
    parser.add_argument(
        "--set", dest="overrides", **override, help="overrides deploy.yaml, e.g. stage.thinker.threads=2"
    )
    parser.add_argument("--checkpoint", type=Path, **checkpoint)
    _add_profile_argument(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="for the rendered files and the log; default: temporary"
    )
    parser.add_argument(
        "--log", metavar="FILE", help="`stderr` or a file; default: server.log in the run folder"
    )
    parser.add_argument(
        "--load-timeout-s", type=float, metavar="S", help="default: what deploy.yaml gives, and 30 s"
    )
    parser.add_argument(
        "--drain-s",
        type=_seconds,
        default=DRAIN_S,
        metavar="S",
        help=f"how long requests that run may go on when the end is asked for; default: {DRAIN_S:g}",
    )
    parser.add_argument(
        "--open-admin",
        action="store_true",
        help="let everybody who reaches the server load models, set up tracing and logging",
    )
    for name, meaning in CERTIFICATES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="FILE.pem", help=meaning)
    parser.add_argument("--check", action="store_true", help="check everything, print it, and start nothing")
    _add_listen_arguments(parser)
    _add_health_argument(parser)
    _keep_after_dashes(parser)
    _set_run(parser, _serve)

    parser = commands.add_parser(
        "reload",
        help="have a running `tritone serve` follow a changed deploy.yaml",
        description="Finish what a pipeline answers, and load it as its deploy.yaml says now; others go on.",
    )
    parser.add_argument("pipeline", nargs="?", default="", metavar="PIPELINE", help="default: every one")
    _add_pid_argument(parser)
    _set_run(parser, _reload)

    parser = commands.add_parser(
        "profile",
        help="see where a stage of a running `tritone serve` spends its time",
        description="Take a profile of a process of a running `tritone serve`, which goes on serving. Its "
        "deploy.yaml must allow that with `profiling: true`.",
    )
    parser.add_argument("pipeline", metavar="PIPELINE")
    parser.add_argument("stage", metavar="STAGE", help="or `orchestrator`")
    parser.add_argument("--kind", default="torch", metavar="KIND", help="torch (default) or py-spy")
    parser.add_argument("--seconds", type=int, default=5, metavar="N", help="how long; default: 5")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="torch: a Chrome trace, .json.gz or .json; py-spy: a flame graph .svg, a speedscope file .json, "
        "or the stacks of this moment .txt",
    )
    parser.add_argument("--instance", type=int, default=0, metavar="N", help="which process; default: 0")
    parser.add_argument("--door", action="store_true", help="the stub of the stage, not its engine")
    _add_pid_argument(parser)
    _set_run(parser, _profile)

    parser = commands.add_parser("render", help="write the model repository from deploy files")
    parser.add_argument("target", **target)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the folder of deploy.yaml itself")
    parser.add_argument("--set", dest="overrides", **override, help="overrides deploy.yaml; needs --out")
    parser.add_argument("--checkpoint", type=Path, **checkpoint)
    _add_profile_argument(parser, " needs --out")
    parser.add_argument("--overwrite", action="store_true", help="replace another deploy.yaml in DIR")
    _set_run(parser, _render)

    parser = commands.add_parser(
        "plan",
        help="show what pipelines will hold in memory, stage by stage",
        description="Show the memory that pipelines will take on each device, with the arithmetic, and "
        "whether it is there. Nothing is loaded; exit status 1 if something does not fit.",
    )
    parser.add_argument("targets", nargs="+", **target)
    parser.add_argument("--set", dest="overrides", **override, help="overrides deploy.yaml")
    parser.add_argument("--checkpoint", type=Path, **checkpoint)
    _add_profile_argument(parser)
    for option, what in (("gpu", "each GPU"), ("ram", "RAM")):
        parser.add_argument(
            f"--{option}-gib",
            type=_positive,
            metavar="N",
            help=f"plan for {what} of this size, not the one here",
        )
    _set_run(parser, _plan)

    parser = commands.add_parser("check", help="check pipelines and deploy files")
    parser.add_argument("targets", nargs="*", **target)
    parser.add_argument("--set", dest="overrides", **override, help="overrides deploy.yaml")
    _set_run(parser, _check)

    parser = commands.add_parser("doctor", help="say what this machine lacks to serve")
    parser.add_argument(
        "--model-repository",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="also look at a folder that tritonserver is to be pointed at",
    )
    _add_listen_arguments(parser)
    _add_health_argument(parser)
    _set_run(parser, _doctor)

    parser = commands.add_parser("models", help="list the pipelines")
    _set_run(parser, _models)

    parser = commands.add_parser(
        "backends",
        help="compose a backend directory for plain tritonserver",
        description="Compose a backend directory and print the command that starts tritonserver with it.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to")
    parser.add_argument("targets", nargs="*", **target)
    _add_listen_arguments(parser)
    _set_run(parser, _backends)


def _add_profile_argument(parser: argparse.ArgumentParser, note: str = "") -> None:
    parser.add_argument(
        "--profile",
        dest="profiles",
        action="append",
        default=[],
        metavar="NAME",
        help="a deploy profile that comes with the pipeline, or a YAML file, laid over deploy.yaml; "
        f"`tritone models` lists them;{note} [PIPELINE:]NAME where several are served",
    )


def _add_pid_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=int, metavar="N", help="of `tritone serve`, where several run")


def _add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    default = Listen()
    parser.add_argument(
        "--host", default=default.host, metavar="IP", help=f"default: {default.host}; 0.0.0.0 opens it"
    )
    for name in ("http", "grpc", "metrics"):
        port = default.ports()[name]
        option = f"--{name}-port"
        parser.add_argument(
            option, type=_port, default=port, metavar="N", help=f"default: {port}; 0 takes a free one"
        )


def _add_health_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--health-port",
        type=_port,
        metavar="N",
        help="tells the health of every stage; default: the one after --metrics-port, and like that 0",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _positive(text: str) -> float:
    number = _seconds(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number from 0 to 65535")
    return int(text)


def _set_run(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    def run(args: argparse.Namespace) -> int:
        try:
            return command(args)
        except TritoneError as error:
            print(f"tritone: {error}", file=sys.stderr)
            return 1

    parser.set_defaults(run=run)


def _keep_after_dashes(parser: argparse.ArgumentParser) -> None:
    """Put what follows `--` into `extra`; argparse by itself would take it for more targets, or refuse it."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        border = words.index("--") if "--" in words else len(words)
        namespace, unknown = parse(words[:border], namespace)
        namespace.extra = words[border + 1 :]
        return namespace, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


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


def _serve(args: argparse.Namespace) -> int:
    from tritone.serve import serve

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
    return serve(options, _say_if_heard, asked)


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


def _plan(args: argparse.Namespace) -> int:
    from tritone.serve import load_pipelines

    given = {"gpu_gib": args.gpu_gib, "ram_gib": args.ram_gib}
    sizes = [f"memory.{name}={value}" for name, value in given.items() if value is not None]
    found = load_pipelines(args.targets, (*_overrides(args), *sizes), args.profiles)
    plan = memory_plan.plan(found, gpus.find(), ram())
    for place in plan.used():
        for line in plan.table(place):
            _say(line)
    plan.require_fit()
    return 0


def _reload(args: argparse.Namespace) -> int:
    from tritone.desk import ask_reload

    _say(ask_reload(args.pipeline, args.pid))
    return 0


def _profile(args: argparse.Namespace) -> int:
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


def _render(args: argparse.Namespace) -> int:
    source = repository.find(args.target)
    overrides = list(args.overrides)
    if args.checkpoint:
        overrides.append(_checkpoint_override(args.checkpoint))
    profile = args.profiles[-1] if args.profiles else None
    deploy = deploys.load(source / repository.DEPLOY, overrides, profile)
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
        if not args.overwrite and deploys.load(present).digest != deploy.digest:
            raise ConfigError(f"{present} has other settings", "give --overwrite, or another --out")
        present.unlink()
    for file in pbtxt.write(deploy, folder):
        _say(str(file))
    for name in repository.strangers(deploy, folder):
        _say(f"warning: {folder / name} is no model of the pipeline, and Triton would load it; remove it")
    return 0


def _require_fit(deploy: Deploy) -> None:
    """ConfigError if it could never be served here, or on the machine that `memory:` describes."""
    try:
        plan = memory_plan.plan([deploy], gpus.find(), ram())
    except ConfigError:
        return  # the checkpoint is not here yet, or not whole
    if any(place.total_bytes is None for place in plan.used()):
        return  # it is rendered for another machine, of which nothing is known
    for place in plan.too_small(before_start=False):
        for line in plan.table(place):
            _say(line)
    plan.require_fit(before_start=False)


def _checkpoint_override(folder: Path) -> str:
    return f"checkpoint={json.dumps(str(folder.expanduser().absolute()))}"


def _require_checkpoint(deploy: Deploy) -> None:
    """Raise ConfigError unless the checkpoint fits the pipeline."""
    if deploy.pipeline.checkpoint is Checkpoint.NONE:
        raise ConfigError(f"pipeline '{deploy.pipeline.name}' has no checkpoint", "leave out --checkpoint")
    for stage in deploy.pipeline.stages:
        deploy.require_checkpoint(stage.name)
    deploy.pipeline.facts(deploy.checkpoint)


def _check(args: argparse.Namespace) -> int:
    targets = args.targets or [
        str(folder) for place in repository.shelves()[:1] for folder in repository.below(place)
    ]
    if not targets:
        raise ConfigError(f"there are no pipelines in '{repository.FOLDER}'", "name a pipeline or its folder")
    status = 0
    for target in targets:
        folder = repository.find(target)
        deploy = deploys.load(folder / repository.DEPLOY, args.overrides)
        for line in chain(deploy, folder):
            _say(line)
        stale = [] if args.overrides else repository.stale(deploy, folder)
        if stale:
            _say(f"  not rendered from this file: {', '.join(stale)}; run `tritone render {target}`")
            status = 1
    return status


def _doctor(args: argparse.Namespace) -> int:
    findings = []
    for finding in doctor.examine(args.model_repository, _listen(args)):
        _say(str(finding))
        findings.append(finding)
    return 1 if worst(findings) is Level.PROBLEM else 0


def _models(_: argparse.Namespace) -> int:
    names = pipelines.names()
    width = max(map(len, names), default=0)
    for name in names:
        pipeline = pipelines.get(name)
        stages = ", ".join(stage.name for stage in pipeline.stages)
        profiles = ", ".join(pipelines.profiles(name))
        offered = f"; profiles: {profiles}" if profiles else ""
        _say(f"{name:<{width}}  {pipeline.doc} ({stages} -> {', '.join(pipeline.modalities)}){offered}")
    return 0


def _backends(args: argparse.Namespace) -> int:
    python = Interpreter.current()
    server = servers.find(python=python)
    folders = [repository.find(target) for target in args.targets]
    folder = servers.compose(server, args.folder)
    loaded = [deploys.load(place / repository.DEPLOY) for place in folders]
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
