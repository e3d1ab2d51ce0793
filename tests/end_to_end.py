"""Runs the real command in processes of its own, and looks at what it leaves behind."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

COMMAND = Path(sys.executable).with_name("verl-engine")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where weights travel
MARK = "VERL_ENGINE_TEST_RUN"
"""Environment variable that every process of a job inherits: how we know them."""
# As in the noxfile: one thread a process, nothing asks the network, nothing is written into the home folder.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": str(ROOT),  # for the reward functions in tests/
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Task:
    """A tiny model, and a recipe for each command."""

    model: Path
    train: Path
    sft: Path


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster of this machine that jobs share."""

    address: str
    mark: str
    """Value of the environment variable that its processes have, those of jobs too."""
    token: Path
    """File that lets a job in."""

    @property
    def is_alive(self) -> bool:
        return _answers(int(self.address.rpartition(":")[2]))

    def kill_head(self) -> None:
        """End the process that knows of all others."""
        [number] = [each for each in marked_processes(self.mark) if "gcs_server " in _title(each)]
        os.kill(number, signal.SIGKILL)

    @property
    def environment(self) -> dict[str, str]:
        """What its processes and its jobs have in common."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            # Else Ray replaces 127.0.0.1 by the address of a network card; see `verl_async.ray.local_cluster`.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(self.site)]),
        }

    @property
    def site(self) -> Path:
        """Folder of packages that are installed for it and for its jobs."""
        return self.token.with_name("site")

    @classmethod
    @contextmanager
    def start(cls, folder: Path) -> Iterator[Cluster]:
        """Start one, on the loopback interface only; leaving ends it, and whatever it has started."""
        port, other_port = _free_ports(2)
        cluster = cls(f"127.0.0.1:{port}", uuid.uuid4().hex, folder / "token")
        cluster.site.mkdir()
        cluster.token.write_text(secrets.token_hex(32), encoding="ascii")
        command = (
            COMMAND.with_name("ray"), "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1",
            f"--ray-client-server-port={other_port}", "--include-dashboard=false", "--num-cpus=4",
            "--object-store-memory=100000000", "--disable-usage-stats",
        )  # fmt: skip
        environment = {**os.environ, **ENVIRONMENT, **cluster.environment, MARK: cluster.mark}
        head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert eventually(lambda: cluster.is_alive, 60.0), "the cluster does not start"
            yield cluster
        finally:
            head.terminate()
            head.wait()
            for process_id in marked_processes(cluster.mark):
                os.kill(process_id, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """What came out of a command."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    """From the last signal, or the wait, to the end."""
    output: Path

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "summary.json").read_text(encoding="utf-8"))
        return found

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of a kind: ``step`` or ``evaluation``."""
        return [record for record in read_lines(self.output / "metrics.jsonl") if record["kind"] == kind]


@dataclass
class Job:
    """A command that runs; leaving the context ends what a failed test would leave behind."""

    command: str
    recipe: Path
    output: Path
    settings: tuple[str, ...] = ()
    cluster: Cluster | None = None
    """Where it runs; without, it starts its own."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __enter__(self) -> Self:
        self._shared_memory = shared_memory()
        settings = [*self.settings, *([f"ray.address={self.cluster.address}"] if self.cluster else [])]
        self._process = subprocess.Popen(
            [COMMAND, self.command, self.recipe, *settings, "--output", self.output],
            cwd=self.recipe.parent,
            env={**os.environ, **ENVIRONMENT, **(self.cluster.environment if self.cluster else {}), MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C of a terminal goes to a whole process group
        )
        return self

    def __exit__(self, *_: object) -> None:
        for process_id in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        self._process.communicate()

    def processes(self, title: str = "") -> list[int]:
        """Ids of this job's processes whose command line begins with `title`."""
        found = marked_processes(self.mark)
        if self.cluster is not None:  # whose other processes have no actor: they stay
            actors = (number for number in marked_processes(self.cluster.mark) if "Actor" in _title(number))
            found += [number for number in actors if _title(number).startswith("ray::")]
        return [number for number in found if _title(number).startswith(title)]

    def program(self, number: int) -> str:
        """Name of the program that a process runs."""
        return Path(_title(number).partition(" ")[0]).name

    def listening(self, title: str = "") -> set[tuple[str, int]]:
        """Host and port of each TCP server of this job's processes, or of those whose command line holds `title`."""
        own = {f"socket:[{inode}]": place for inode, place in _servers().items()}
        processes = (number for number in self.processes() if title in _title(number))
        return {own[link] for number in processes for link in _open_files(number) if link in own}

    def wait_for_steps(self, count: int, timeout_s: float = 150.0) -> None:
        """Wait until so many training steps are recorded."""
        deadline = time.monotonic() + timeout_s
        while len(read_lines(self.output / "metrics.jsonl")) < count:
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, "the job does not train"
            time.sleep(0.05)

    def wait_for_process(self, name: str, timeout_s: float = 30.0) -> None:
        """Wait until the job has a process with this in its command line."""
        assert eventually(lambda: any(name in _title(number) for number in self.processes()), timeout_s), name

    def press_ctrl_c(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def hang_up(self) -> None:
        """End it as a terminal that goes away: nobody reads, and the whole process group hears of it, twice."""
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        for _ in range(2):
            os.killpg(self._process.pid, signal.SIGHUP)
            time.sleep(0.3)

    def terminate(self) -> None:
        """End it as a scheduler does: SIGTERM to the first process only."""
        self._process.terminate()

    def wait(self, timeout_s: float = 200.0) -> Ended:
        """Wait for the end, and check that no process and no shared memory is left."""
        started = time.monotonic()
        stdout, stderr = self._process.communicate(timeout=timeout_s)
        seconds = time.monotonic() - started
        assert eventually(lambda: not self.processes()), f"still there: {[_title(one) for one in self.processes()]}"
        # Those of jobs that run beside this test go away too.
        left = shared_memory() - self._shared_memory
        assert eventually(lambda: not any(path.exists() for path in left)), left
        return Ended(self._process.returncode, stdout, stderr, seconds, self.output)


def run(command: str, recipe: Path, output: Path, *settings: str, cluster: Cluster | None = None) -> Ended:
    """Run a command to its end, which must be a good one with nothing on standard error."""
    with Job(command, recipe, output, settings, cluster) as job:
        ended = job.wait()
    assert ended.code == 0, ended.stderr
    # A warning of little shared memory tells of the machine, not of the job.
    assert [line for line in ended.stderr.splitlines() if not line.startswith("warning: ")] == []
    return ended


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines that may not be there yet, or be in the middle of a line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def shared_memory() -> set[Path]:
    """List the files in shared memory, without the semaphores that other tests' multiprocessing makes."""
    return {path for path in SHARED_MEMORY.iterdir() if not path.name.startswith("sem.")}


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Wait until something becomes true; processes that were told to end take a moment."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def marked_processes(mark: str) -> list[int]:
    """Ids of the processes that inherited a mark."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [number for number in numbers if _is_marked(number, mark)]


def _is_marked(number: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{number}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


def _answers(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex(("127.0.0.1", port)) == 0


def _servers() -> dict[str, tuple[str, int]]:
    """Host and port of each listening TCP socket of the machine, by inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":  # LISTEN
                host, port = words[1].split(":")
                words_of_host = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
                address = ipaddress.ip_address(b"".join(words_of_host))
                found[words[9]] = (str(getattr(address, "ipv4_mapped", None) or address), int(port, 16))
    return found


def _open_files(number: int) -> list[str]:
    try:
        return [str(link.readlink()) for link in Path(f"/proc/{number}/fd").iterdir()]
    except OSError:  # it ends
        return []


def _title(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
