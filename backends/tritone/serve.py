"""`tritone serve`: render, check, start a server, wait until each pipeline answers, watch it, end it cleanly.

    targets ──► deploy files ──► checks ──► run folder ──► supervisor: server, watches, health ──► ended

    <run folder>/models/<pipeline>/   the rendered model repository
                 backends/            see server.compose
                 server.log           what the server, its engines and the supervisor say
                 ready.json           the addresses, while everything answers
                 mps/                 see mps.py

The stage doors restart their engines themselves; a door, an orchestrator or a server that dies or hangs is
started again by the supervisor.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tritone import deploy_reader, doctor, guard, mps, repository
from tritone.asked import Asked, ServeOptions
from tritone.deploy import Deploy
from tritone.desk import Desk
from tritone.errors import ConfigError, TritoneError
from tritone.finding import Level
from tritone.health import HealthServer
from tritone.room import Room
from tritone.running_server import LOG_NAME, READY_NAME, RunningServer, log_file
from tritone.server import Interpreter, Listen
from tritone.supervisor import Supervisor

OWN_ENTRIES = ("models", "backends", "mps", LOG_NAME, READY_NAME)


def serve(options: ServeOptions, say: Callable[[str], None], asked: Asked) -> int:
    """Serve until asked to end; returns the exit status. Raises TritoneError when the server fails.

    say: takes each line for the user.
    """
    pipelines = load_pipelines(options.targets, options.overrides, options.profiles)
    python = Interpreter.current()
    server, findings = doctor.machine(python)
    room = Room.now()
    findings += doctor.for_pipelines(pipelines, room, options.listen, options.extra)
    for finding in findings:
        if options.check_only or finding.level is not Level.OK:
            say(str(finding))
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if problems or server is None:
        raise ConfigError(f"{problems} problem(s) in the way, listed above", "mend them and try again")
    wants_mps = mps.is_wanted(pipelines)
    if options.check_only:
        say("all checks passed")
        return 0
    say(f"server {server}")
    options = replace(options, listen=choose_ports(options.listen))
    with run_folder(options.run_folder) as (folder, keep), ExitStack() as stack:
        log = log_file(options, folder)
        begin_log(log)
        say(f"log    {log or 'stderr'}")
        environ = stack.enter_context(mps.daemon(folder)) if wants_mps else {}
        supervisor = Supervisor(
            pipelines,
            room,
            options,
            lambda deploys: RunningServer(server, python, deploys, folder, options, environ),
            lambda: load_pipelines(options.targets, options.overrides, options.profiles),
            say,
            asked,
        )
        port = doctor.bind(options.listen.host, options.listen.health)
        stack.callback(HealthServer(port, supervisor.board).close)
        stack.callback(Desk(supervisor.reload, supervisor.profile).close)
        try:
            supervisor.run()
            return 0
        except TritoneError:
            keep(log)
            raise


# -- before the start ----------------------------------------------------------------------------------------


def load_pipelines(
    targets: Sequence[str], overrides: Sequence[str], profiles: Sequence[str] = ()
) -> list[Deploy]:
    """The deploys of all targets with the overrides and the profile that are meant for them."""
    folders = [repository.find(target) for target in targets]
    plain = [override for override in overrides if _addressee(override) is None]
    found: dict[str, Deploy] = {}
    for folder in folders:
        file = folder / repository.DEPLOY
        name = deploy_reader.load(file).pipeline.name
        own = [override.partition(":")[2] for override in overrides if _addressee(override) == name]
        if name in found:
            raise ConfigError(f"pipeline '{name}' is named twice", "name each pipeline once")
        found[name] = deploy_reader.load(file, [*plain, *own], _profile_of(name, profiles))
    for override in overrides:
        if _addressee(override) not in (None, *found):
            raise ConfigError(
                f"override '{override}' is for pipeline '{_addressee(override)}'",
                f"served are {', '.join(found)}",
            )
    return list(found.values())


def _profile_of(pipeline: str, profiles: Sequence[str]) -> str | None:
    """The one that is meant for a pipeline; "pipeline:name" goes before "name"."""
    own = [profile.partition(":")[2] for profile in profiles if profile.startswith(f"{pipeline}:")]
    plain = [profile for profile in profiles if ":" not in profile]
    if len(own) > 1 or (not own and len(plain) > 1):
        raise ConfigError(f"pipeline '{pipeline}' has two profiles", "give one, which may lie over the other")
    return next(iter(own or plain), None)


def _addressee(override: str) -> str | None:
    """The pipeline that an override names, as in "smoltalk:max_in_flight=4"."""
    path = override.partition("=")[0]
    return path.partition(":")[0] if ":" in path else None


def choose_ports(listen: Listen) -> Listen:
    """`listen` with free ports in place of 0. They are held until all are chosen, so that they differ."""
    with ExitStack() as stack:
        chosen = {}
        for name, port in listen.ports().items():
            if port == 0:
                chosen[name] = stack.enter_context(doctor.bind_free(listen.host)).getsockname()[1]
        return replace(listen, **chosen)


def begin_log(log: Path | None) -> None:
    """Empty the log; the servers of this run and the supervisor add to it."""
    if log is not None:
        try:
            log.open("wb").close()
        except OSError as error:
            raise ConfigError(f"cannot write the log {log}: {error.strerror}", "give another --log") from None


@contextlib.contextmanager
def run_folder(given: Path | None) -> Iterator[tuple[Path, Callable[[Path | None], None]]]:
    """A folder for one run, and a function that keeps its log: a temporary one is removed at the end.

    A given folder is kept. It must be empty or of an earlier run.
    """
    if given is not None:
        _clear(given)
        yield given, lambda log: None
        return
    folder = Path(tempfile.mkdtemp(prefix="tritone-"))
    kept: list[Path] = []
    try:
        yield folder, lambda log: kept.append(log) if log is not None else None
    finally:
        if any(log.parent == folder for log in kept):
            for entry in folder.iterdir():
                if entry not in kept:
                    _remove(entry)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _clear(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    others = [entry.name for entry in folder.iterdir() if entry.name not in OWN_ENTRIES]
    if others:
        raise ConfigError(
            f"the run folder '{folder}' holds '{others[0]}', which is not of a run", "name an empty one"
        )
    guard.quit_mps(guard.mps_folder(folder))  # of a run whose guard was killed too
    for entry in folder.iterdir():
        _remove(entry)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
