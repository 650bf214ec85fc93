"""Real servers for tests: started by `tritone serve` or plain, on free ports, gone without a trace."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tritone import doctor, guard
from tritone import server as packaged
from tritone_client import AsyncTritoneClient
from waiting import wait_until

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 400
END_TIMEOUT_S = 120
REGION = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)


@dataclass
class RunningServer:
    """A server that is ready."""

    process: subprocess.Popen
    grpc_url: str
    http_url: str
    metrics_url: str
    folder: Path  # engines of this server name it in their command line
    log: Path
    server_pid: int  # of tritonserver itself

    def client(self, pipeline):
        return AsyncTritoneClient(self.grpc_url, pipeline=pipeline)

    def engine_pids(self, stages):
        """Engine processes that host exactly `stages`, a comma-separated list."""
        return [pid for pid, words in self._engines() if f"--stages={stages}" in words]

    def engine_pid(self, stages):
        """The one of them, once it is up."""
        return wait_until(lambda: self.engine_pids(stages), what=f"no engine hosts {stages}", every_s=0.05)[0]

    def all_pids(self):
        """Server, stubs and engines."""
        found = {pid for pid, _ in self._engines()}
        for pid, words in command_lines():
            if any(str(self.folder) in word for word in words):
                found.add(pid)
        return found

    def regions(self):
        """Shared memory that its processes map."""
        found = set()
        for pid in self.all_pids():
            with contextlib.suppress(OSError):  # it ended meanwhile
                found |= set(REGION.findall(Path(f"/proc/{pid}/maps").read_text()))
        return found

    def traces(self):
        """What an end has to take away: processes and shared memory."""
        return self.all_pids(), self.regions()

    def assert_gone(self, traces):
        """Nothing of `traces` is left, nor a socket of the run; the kernel may take a while to see to it."""
        pids, regions = traces
        assert regions, "no process of the server maps shared memory"

        def leftovers():
            alive = [pid for pid in pids if guard.is_running(pid)]
            shared = [region for region in regions if Path(region).exists()]
            unix = Path("/proc/net/unix").read_text().splitlines()
            sockets = [line.split()[-1] for line in unix if f"tritone/{self.server_pid}-" in line]
            return alive + shared + sockets

        wait_until(lambda: not leftovers(), what="processes, memory or sockets outlived the server")

    def _engines(self):
        for pid, words in command_lines():
            if "tritone.engines.host" in words and any(str(self.folder) in word for word in words):
                yield pid, words


def command_lines():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue  # it ended meanwhile


def tail(log):
    return log.read_text(errors="replace")[-3000:] if log.exists() else "no log"


@pytest.fixture(scope="session")
def echo_folder(tmp_path_factory):
    """A deploy file for the weight-free pipeline of tests/pipelines."""
    folder = tmp_path_factory.mktemp("echo")
    pipeline = ROOT / "tests" / "pipelines" / "echo.py"
    (folder / "deploy.yaml").write_text(yaml.safe_dump({"pipeline": str(pipeline)}))
    return folder


@contextlib.contextmanager
def running(words, **options):
    """A process that has ended when this is left, however that is."""
    process = subprocess.Popen(words, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its guard, or its doors, end what it has started
                process.communicate()


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """serve(*targets, overrides=(), options=()) starts `tritone serve`; returns when every stage answers."""
    with served(tmp_path_factory) as start:
        yield start


@pytest.fixture
def serve_once(tmp_path_factory):
    """The same for one test, with which its servers end."""
    with served(tmp_path_factory) as start:
        yield start


@contextlib.contextmanager
def served(tmp_path_factory):
    def start(*targets, overrides=(), options=()):
        run_folder = tmp_path_factory.mktemp("run")
        words = [sys.executable, "-m", "tritone", "serve", *map(str, targets), f"--run-dir={run_folder}"]
        words += [f"--{kind}-port=0" for kind in ("http", "grpc", "metrics")]
        words += [f"--set={override}" for override in overrides] + list(options)
        log = run_folder / "server.log"
        with contextlib.ExitStack() as own:
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = own.enter_context(running(words, **output))

            def ready():
                assert process.poll() is None, process.stdout.read() + tail(log)
                return (run_folder / "ready.json").exists()

            wait_until(ready, START_TIMEOUT_S, f"not ready: {log}", every_s=0.1)
            facts = json.loads((run_folder / "ready.json").read_text())
            urls = [facts[kind] for kind in ("grpc", "http", "metrics")]
            server = RunningServer(process, *urls, run_folder, log, facts["pid"])
            ends.push(own.pop_all())
        servers.append(server)
        return server

    servers = []
    with contextlib.ExitStack() as ends:
        yield start
        left = [(server, server.traces()) for server in servers if server.process.poll() is None]
        for server, _ in left:
            server.process.send_signal(signal.SIGTERM)
        for server, traces in left:
            output, _ = server.process.communicate(timeout=END_TIMEOUT_S)
            assert server.process.returncode == 0, output + tail(server.log)
            server.assert_gone(traces)


@pytest.fixture
def plain_server(tmp_path):
    """plain_server(folder) starts tritonserver itself on a rendered repository, with its default flags."""

    def start(folder):
        subprocess.run(
            [sys.executable, "-m", "tritone", "render", str(folder), f"--out={tmp_path / 'repository'}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found, python = packaged.find(), packaged.Interpreter.current()
        backends = packaged.compose(found, tmp_path / "backends")
        http, grpc, metrics = free_ports(3)
        words = [
            str(found.binary),
            f"--model-repository={tmp_path / 'repository'}",
            f"--backend-directory={backends}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--metrics-address=127.0.0.1",
            f"--http-port={http}",
            f"--grpc-port={grpc}",
            f"--metrics-port={metrics}",
        ]
        log = tmp_path / "server.log"
        with log.open("wb") as output, contextlib.ExitStack() as own:
            options = {"env": packaged.environment(found, python), "stdout": output, "stderr": output}
            process = own.enter_context(running(words, **options))
            urls = f"127.0.0.1:{grpc}", f"http://127.0.0.1:{http}", f"http://127.0.0.1:{metrics}/metrics"
            server = RunningServer(process, *urls, tmp_path, log, process.pid)

            def ready():
                assert process.poll() is None, tail(log)
                ask = ["curl", "-sf", f"{server.http_url}/v2/health/ready"]
                return subprocess.run(ask, stdout=subprocess.DEVNULL).returncode == 0

            wait_until(ready, START_TIMEOUT_S, f"not ready: {log}", every_s=0.1)
            own.callback(end_well, server)
            ends.push(own.pop_all())
        return server

    def end_well(server):
        traces = server.traces()
        server.process.terminate()
        assert server.process.wait(timeout=END_TIMEOUT_S) == 0, tail(server.log)
        server.assert_gone(traces)

    with contextlib.ExitStack() as ends:
        yield start


def free_ports(count):
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(doctor.bind_free("127.0.0.1")) for _ in range(count)]
        return [probe.getsockname()[1] for probe in held]
