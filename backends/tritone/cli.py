"""The words of the commands that run a server: serve, reload, profile, render, plan, check, doctor, models
and backends.

    words ─► argparse ─► Namespace ─► commands.py ─► exit status

Each gets `run`, a function of the parsed arguments that returns the exit status: 0, or 1 with one sentence
on stderr.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritone import commands
from tritone.asked import DRAIN_S
from tritone.errors import TritoneError
from tritone.server import Listen

TARGET: dict[str, Any] = {"metavar": "PIPELINE", "help": "its name, or a folder with a deploy.yaml"}


def add_commands(subparsers: Any) -> None:
    """Add the commands to what argparse's `add_subparsers` gave."""
    for add in (
        _add_serve,
        _add_reload,
        _add_profile,
        _add_render,
        _add_plan,
        _add_check,
        _add_doctor,
        _add_models,
        _add_backends,
    ):
        add(subparsers)


def _add_serve(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="start a Triton server with pipelines",
        description="Render and check pipelines, start a Triton server with them, and watch it until Ctrl-C.",
        epilog="Options for the server itself may follow `--`, e.g. -- --log-verbose=1",
    )
    parser.add_argument("targets", nargs="+", **TARGET)
    _add_override_argument(parser, ", e.g. stage.thinker.threads=2")
    _add_checkpoint_argument(parser)
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
    for name, meaning in commands.CERTIFICATES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="FILE.pem", help=meaning)
    parser.add_argument("--check", action="store_true", help="check everything, print it, and start nothing")
    _add_listen_arguments(parser)
    _add_health_argument(parser)
    _keep_after_dashes(parser)
    _set_run(parser, commands.serve)


def _add_reload(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "reload",
        help="have a running `tritone serve` follow a changed deploy.yaml",
        description="Finish what a pipeline answers, and load it as its deploy.yaml says now; others go on.",
    )
    parser.add_argument("pipeline", nargs="?", default="", metavar="PIPELINE", help="default: every one")
    _add_pid_argument(parser)
    _set_run(parser, commands.reload)


def _add_profile(subparsers: Any) -> None:
    parser = subparsers.add_parser(
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
    _set_run(parser, commands.profile)


def _add_render(subparsers: Any) -> None:
    parser = subparsers.add_parser("render", help="write the model repository from deploy files")
    parser.add_argument("target", **TARGET)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the folder of deploy.yaml itself")
    _add_override_argument(parser, "; needs --out")
    _add_checkpoint_argument(parser)
    _add_profile_argument(parser, " needs --out")
    parser.add_argument("--overwrite", action="store_true", help="replace another deploy.yaml in DIR")
    _set_run(parser, commands.render)


def _add_plan(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="show what pipelines will hold in memory, stage by stage",
        description="Show the memory that pipelines will take on each device, with the arithmetic, and "
        "whether it is there. Nothing is loaded; exit status 1 if something does not fit.",
    )
    parser.add_argument("targets", nargs="+", **TARGET)
    _add_override_argument(parser)
    _add_checkpoint_argument(parser)
    _add_profile_argument(parser)
    for option, what in (("gpu", "each GPU"), ("ram", "RAM")):
        parser.add_argument(
            f"--{option}-gib",
            type=_positive,
            metavar="N",
            help=f"plan for {what} of this size, not the one here",
        )
    _set_run(parser, commands.plan)


def _add_check(subparsers: Any) -> None:
    parser = subparsers.add_parser("check", help="check pipelines and deploy files")
    parser.add_argument("targets", nargs="*", **TARGET)
    _add_override_argument(parser)
    _set_run(parser, commands.check)


def _add_doctor(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="say what this machine lacks to serve")
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
    _set_run(parser, commands.doctor)


def _add_models(subparsers: Any) -> None:
    parser = subparsers.add_parser("models", help="list the pipelines")
    _set_run(parser, commands.models)


def _add_backends(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "backends",
        help="compose a backend directory for plain tritonserver",
        description="Compose a backend directory and print the command that starts tritonserver with it.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to")
    parser.add_argument("targets", nargs="*", **TARGET)
    _add_listen_arguments(parser)
    _set_run(parser, commands.backends)


def _add_override_argument(parser: argparse.ArgumentParser, note: str = "") -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"overrides deploy.yaml{note}",
    )


def _add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="its weights; default: what deploy.yaml says, else the cache",
    )


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
