"""The supervisor of `tritone serve`: one server after another, until it is asked to end or gives up.

    start ──► ready ──► watched ──► asked ──► drained ──► ended
      ▲                    │
      └── back-off ── cleaned ◄── it died, or a pipeline has a verdict

What goes wrong and what is done about it is one line each, on the console and in the server's log.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tritone import server_log, wire
from tritone.asked import Asked, ServeOptions
from tritone.deploy import Deploy
from tritone.errors import ConfigError, NotFound, TritoneError, Unavailable, suggestion
from tritone.health import ENDING, SERVING, Board
from tritone.pipeline_watch import PipelineWatch
from tritone.profiling import Profiler
from tritone.room import Room, require_room
from tritone.running_server import POLL_S, RunningServer, ServerCrashed
from tritone.server import Listen

BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # before each start that follows a failure
MAX_FAILURES = 5  # within FAILURE_WINDOW_S; the next one ends the command
FAILURE_WINDOW_S = 600.0


class Supervisor:
    """Runs on the main thread; `reload` and `profile` may be called on any."""

    def __init__(
        self,
        pipelines: Sequence[Deploy],
        room: Room,
        options: ServeOptions,
        make: Callable[[Sequence[Deploy]], RunningServer],
        reread: Callable[[], Sequence[Deploy]],
        say: Callable[[str], None],
        asked: Asked,
    ) -> None:
        """room: before anything of theirs ran. make: a server that is not started. reread: the deploy files,
        as they are now; raises ConfigError. say: takes each line for the user.
        """
        self.board = Board({d.pipeline.name: [s.name for s in d.pipeline.stages] for d in pipelines})
        self._pipelines: dict[str, Deploy] = {deploy.pipeline.name: deploy for deploy in pipelines}
        self._room = room
        self._options = options
        self._make = make
        self._reread = reread
        self._say = say
        self._asked = asked
        self._run: RunningServer | None = None
        self._watches: Mapping[str, PipelineWatch] = {}
        self._profiler = Profiler()
        self._changing = threading.Lock()  # one at a time: the next may need the memory that it gives back
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES + 1)  # time.monotonic()
        self._down_since_s: float | None = None
        self._start_s = 0.0  # how long the last start took
        self._announced = False

    def run(self) -> None:
        """Serve until asked to end. Raises TritoneError when the first start is refused, or too many fail."""
        was_ready = False
        while not self._asked.times:
            run = self._run = self._make(list(self._pipelines.values()))
            try:
                run.start(self._say)
                run.wait_ready(self._say, self._asked)
                was_ready = was_ready or run.was_ready
                self._start_s = run.age_s
                self._serve(run)
            except TritoneError as error:
                if isinstance(error, ConfigError) or not (was_ready or isinstance(error, ServerCrashed)):
                    raise
                self._note_failure(error)
            finally:
                if self._asked.times:
                    self.board.beat(ENDING)
                watches, self._watches = self._watches, {}
                for watch in watches.values():
                    watch.stop()
                ended = run.end(self._say, self._asked)
                for watch in watches.values():
                    watch.join()
            if not self._asked.times:
                self._note(f"server is cleaned away: {ended}")
                self._pause()

    def reload(self, pipeline: str) -> str:
        """Serve what the deploy file of a pipeline says now, "" for all; what was done.

        Raises TritoneError at the first that cannot be: those before it are served anew, it and the rest as
        before.
        """
        if pipeline:
            self._served(pipeline)
        with self._changing:
            fresh = {deploy.pipeline.name: deploy for deploy in self._reread()}
            if set(fresh) != set(self._pipelines):
                raise ConfigError(
                    f"the files are of {', '.join(fresh)} now", "restart to serve other pipelines"
                )
            return "; ".join([self._change(fresh[name]) for name in ([pipeline] if pipeline else fresh)])

    def profile(self, order: wire.Profile) -> wire.Profiled:
        """Take a profile of a process of the server. Raises TritoneError when it cannot be."""
        deploy, run = self._served(order.pipeline), self._run
        if run is None or order.pipeline not in self._watches:
            raise Unavailable("the server is not ready", "try again when it is")
        return self._profiler.take(order, deploy, run.pid, run.stubs)

    def _served(self, pipeline: str) -> Deploy:
        """Raises NotFound for a pipeline that is not."""
        if pipeline not in self._pipelines:
            raise NotFound(f"pipeline '{pipeline}' is not served", suggestion(pipeline, self._pipelines))
        return self._pipelines[pipeline]

    # -- one server ------------------------------------------------------------------------------------------

    def _serve(self, run: RunningServer) -> None:
        """Watch a server until the end is asked for. Raises TritoneError when another one must be started."""
        if self._asked.times:
            return
        self.board.beat(SERVING)
        self._announce(run)
        self._watches = {
            name: PipelineWatch(run, deploy, self.board, self._note)
            for name, deploy in self._pipelines.items()
        }
        for watch in self._watches.values():
            watch.start()
        while not self._asked.wait(POLL_S):
            self.board.beat()
            run.check_alive("while serving")
            for watch in self._watches.values():
                if watch.verdict is not None:
                    raise watch.verdict
            if self._asked.take_reload():
                threading.Thread(target=self._reload_all, daemon=True, name="reload").start()

    def _change(self, new: Deploy) -> str:
        """Serve a pipeline as `new` says; what that took. Raises TritoneError when all is as it was."""
        name = new.pipeline.name
        watch = self._watches.get(name)
        if watch is None:
            raise Unavailable("the server is not ready", "try again when it is")
        if new.digest != self._pipelines[name].digest:
            require_room(list(self._pipelines.values()), new, self._room, Room.now())
        done = watch.change(new).result()
        self._pipelines[name] = new
        return done

    def _reload_all(self) -> None:
        """What a signal asks for: every pipeline that it can be done for."""
        try:
            with self._changing:
                for deploy in self._reread():
                    if deploy.pipeline.name in self._pipelines:
                        self._note_change(deploy)
        except TritoneError as error:
            self._note(f"reload: {error}")

    def _note_change(self, deploy: Deploy) -> None:
        try:
            self._change(deploy)
        except Exception as error:
            self._note(f"reload of {deploy.pipeline.name}: {error}")

    # -- the next one ----------------------------------------------------------------------------------------

    def _note_failure(self, error: TritoneError) -> None:
        """Raises TritoneError when it was one too many."""
        now = time.monotonic()
        self._down_since_s = self._down_since_s or now
        self._failures.append(now)
        self._note(f"server: {error.what}")
        recent = self._recent(now)
        if recent > MAX_FAILURES:
            minutes = FAILURE_WINDOW_S / 60
            raise TritoneError(
                f"the server failed {recent} times within {minutes:g} minutes, last: {error.what}", error.cure
            )
        self.board.beat("being restarted")
        self.board.expect(self._backoff_s() + self._start_s)

    def _recent(self, now: float) -> int:
        return sum(now - failure < FAILURE_WINDOW_S for failure in self._failures)

    def _backoff_s(self) -> float:
        return BACKOFF_S[min(self._recent(time.monotonic()), len(BACKOFF_S)) - 1]

    def _pause(self) -> None:
        pause_s = self._backoff_s()
        self.board.expect(pause_s + self._start_s)
        self._note(f"server starts again in {pause_s:g} s")
        self._asked.wait(pause_s)

    # -- words -----------------------------------------------------------------------------------------------

    def _announce(self, run: RunningServer) -> None:
        listen, names = self._options.listen, list(self._pipelines)
        run.announce(listen.health_url)
        if self._down_since_s is not None:
            self._note(f"server is ready again after {time.monotonic() - self._down_since_s:.1f} s")
            self._down_since_s = None
        if self._announced:
            return
        self._announced = True
        self._say(f"ready  {', '.join(names)} after {run.age_s:.1f} s")
        self._say(
            f"gRPC {listen.grpc_url}   HTTP {listen.http_url}   metrics {listen.metrics_url}   "
            f"health {listen.health_url}/ready"
        )
        for name in names:
            address = "" if listen.grpc_url == f"{Listen.host}:{Listen.grpc}" else f" --url {listen.grpc_url}"
            self._say(f'try: tritone chat "Why is the sky blue?" --pipeline {name}{address}')

    def _note(self, line: str) -> None:
        """Say a line with the time, and keep it with the server's own."""
        stamped = f"{time.strftime('%H:%M:%S')} {line}"
        self._say(stamped)
        if self._run is not None:
            server_log.append(self._run.log_file, f"tritone serve: {stamped}")
