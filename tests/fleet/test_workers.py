"""``llamapipe serve --workers`` with real processes: connections, deaths, replacements, the end."""

from __future__ import annotations

import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.bert_model import bert_model
from support.control import Worker as Thread
from support.control import all_results, wait_until
from support.fleet_servers import N_LONG, SHORT, LongStream, WorkerServer, wait_for_end, worker_server
from support.run_script import environment

import llamapipe as lp
from llamapipe.fleet.command import command_with
from llamapipe.fleet.placement import Placement
from llamapipe.fleet.supervisor import Backoff, Supervisor, WorkerFailedError
from llamapipe.host.cores import CoreShare, core_shares

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores",
)
OPTIONS = ("--n-ctx", "4096", "--n-seq-max", "8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerServer]:
    with worker_server(2, *OPTIONS, log=tmp_path_factory.mktemp("workers") / "log") as server:
        yield server


def ask(server: WorkerServer) -> httpx.Response:
    """One short request on a connection of its own."""
    return server.client.post("/v1/completions", json=SHORT)


class TestTwoWorkers:
    def test_connections_go_to_the_worker_with_the_fewest(self, server: WorkerServer) -> None:
        clients = [httpx.Client(base_url=server.url, timeout=120) for _ in range(6)]
        answers = [client.post("/v1/completions", json=SHORT) for client in clients]
        assert sorted(answer.headers["x-llamapipe-worker"] for answer in answers) == list("000111")
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        for client in clients:
            client.close()
        wait_until(lambda: sum(worker.n_open for worker in server.workers()) == 1)  # that of this question

    def test_cores_are_disjoint(self, server: WorkerServer) -> None:
        first, second = (os.sched_getaffinity(pid) for pid in server.pids())
        assert first
        assert second
        assert not first & second
        for pid in server.pids():  # of all threads: it was pinned before it had any
            masks = {
                frozenset(os.sched_getaffinity(int(task.name)))
                for task in Path(f"/proc/{pid}/task").iterdir()
            }
            assert len(masks) == 1

    def test_health_and_metrics_speak_for_both(self, server: WorkerServer) -> None:
        assert server.client.get("/health").json() == {"status": "ok", "workers_ready": 2, "workers": 2}
        before = server.values()
        clients = [httpx.Client(base_url=server.url, timeout=120) for _ in range(2)]  # one on each worker
        answers = [client.post("/v1/completions", json=SHORT) for client in clients]
        assert {answer.headers["x-llamapipe-worker"] for answer in answers} == {"0", "1"}
        for client in clients:
            client.close()
        after = server.values()
        assert after["llamapipe_generated_tokens_total"] - before["llamapipe_generated_tokens_total"] == 8
        count = 'llamapipe_requests_total{path="/v1/completions",status="200"}'
        assert after[count] - before.get(count, 0) == 2
        assert after["llamapipe_kv_cells"] == 2 * 8 * 4096
        assert after["llamapipe_compute_threads"] <= len(os.sched_getaffinity(0))

    def test_the_list_of_requests_is_that_of_all(self, server: WorkerServer) -> None:
        streams = [LongStream(server) for _ in range(2)]  # one on each worker
        assert {stream.worker for stream in streams} == {0, 1}
        assert all(stream.finishes() for stream in streams)
        entries = server.client.get("/requests").json()["data"]
        assert {entry["worker"] for entry in entries[:2]} == {0, 1}
        assert entries[0]["ended_at"] >= entries[1]["ended_at"]
        assert {entry["n_completion_tokens"] for entry in entries[:2]} == {N_LONG}

    def test_a_busy_worker_holds_up_the_metrics_for_a_bounded_time(self, server: WorkerServer) -> None:
        before = server.values()
        with httpx.Client(base_url=server.url, timeout=120) as client:
            own = int(client.post("/v1/completions", json=SHORT).headers["x-llamapipe-worker"])
            other = next(worker for worker in server.workers() if worker.number != own)
            os.kill(other.pid, signal.SIGSTOP)
            try:
                text = client.get("/metrics").text
            finally:
                os.kill(other.pid, signal.SIGCONT)
        line = next(line for line in text.splitlines() if line.startswith("llamapipe_generated_tokens_total"))
        assert float(line.split()[1]) == before["llamapipe_generated_tokens_total"] + 4  # its last ones count

    def test_a_killed_worker_takes_only_its_own_streams_along(self, server: WorkerServer) -> None:
        clients = [httpx.Client(base_url=server.url, timeout=120) for _ in range(2)]
        for client in clients:  # one on each worker: the counts of the one that is killed must not be lost
            client.post("/v1/completions", json={**SHORT, "max_tokens": 100, "ignore_eos": True})
        before = server.values()
        for client in clients:
            client.close()
        victim, other = server.workers()
        streams = [LongStream(server) for _ in range(6)]
        lost = [stream for stream in streams if stream.worker == victim.number]
        assert len(lost) == 3
        os.kill(victim.pid, signal.SIGKILL)
        assert ask(server).status_code == 200
        assert not any(all_results([Thread(stream.finishes) for stream in lost]))
        assert all(all_results([Thread(stream.finishes) for stream in streams if stream not in lost]))
        wait_until(lambda: len(server.pids()) == 2)
        assert other.pid in server.pids()
        assert victim.pid not in server.pids()
        after = server.values()
        assert (
            after["llamapipe_generated_tokens_total"]
            >= before["llamapipe_generated_tokens_total"] + 3 * N_LONG
        )
        assert after["llamapipe_worker_restarts_total"] == before["llamapipe_worker_restarts_total"] + 1

    def test_a_connection_that_a_killed_worker_did_not_take_is_served(self, server: WorkerServer) -> None:
        clients = [httpx.Client(base_url=server.url, timeout=120) for _ in range(4)]
        served_by = [int(client.get("/health").headers["x-llamapipe-worker"]) for client in clients]
        victim = next(worker for worker in server.workers() if worker.number == served_by[0])
        other = clients[served_by.index(1 - victim.number)]
        for client, number in zip(clients, served_by, strict=True):
            if number == victim.number:
                client.close()

        def n_open() -> float:
            text = other.get("/metrics").text
            line_of_victim = next(line for line in text.splitlines() if f'pid="{victim.pid}"' in line)
            return float(line_of_victim.split()[1])

        wait_until(lambda: n_open() == 0)
        os.kill(victim.pid, signal.SIGSTOP)
        asking = [Thread(ask, server) for _ in range(2)]  # both to the one with none
        wait_until(lambda: n_open() == 2)
        assert all(asked.is_alive() for asked in asking)
        os.kill(victim.pid, signal.SIGKILL)
        assert [answer.status_code for answer in all_results(asking)] == [200] * 2
        for client in clients:
            client.close()
        wait_until(lambda: len(server.pids()) == 2)

    def test_a_worker_without_descriptors_is_passed_over(self, server: WorkerServer) -> None:
        poor, other = server.workers()
        _, hard = resource.prlimit(poor.pid, resource.RLIMIT_NOFILE)
        clients = [httpx.Client(base_url=server.url, timeout=120) for _ in range(6)]
        normal = resource.prlimit(poor.pid, resource.RLIMIT_NOFILE, (3, hard))  # those that it has stay
        try:
            answers = [client.get("/v1/models") for client in clients]
        finally:
            resource.prlimit(poor.pid, resource.RLIMIT_NOFILE, normal)
        for client in clients:
            client.close()
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-llamapipe-worker"] for answer in answers} == {str(other.number)}
        wait_until(lambda: {ask(server).headers["x-llamapipe-worker"] for _ in range(2)} == {"0", "1"})

    def test_replacing_all_workers_fails_no_request(self, server: WorkerServer) -> None:
        before = set(server.pids())
        over = threading.Event()

        def keep_asking(keep_alive: bool) -> int:
            n = 0
            with httpx.Client(base_url=server.url, timeout=120) as client:
                while not over.is_set():
                    answer = client.post("/v1/completions", json=SHORT) if keep_alive else ask(server)
                    assert answer.status_code == 200
                    n += 1
            return n

        callers = [Thread(keep_asking, keep_alive) for keep_alive in (True, True, False, False)]
        idle = httpx.Client(base_url=server.url, timeout=120)
        assert idle.get("/health").status_code == 200
        server.process.send_signal(signal.SIGHUP)
        try:
            wait_until(lambda: len(server.pids()) == 2 and not before & set(server.pids()))
        finally:
            over.set()
        assert all(n > 3 for n in all_results(callers))
        wait_for_end(sorted(before))  # the one with the idle connection closes it
        idle.close()

    def test_a_worker_that_is_told_to_end_finishes_and_is_followed(self, server: WorkerServer) -> None:
        streams = [LongStream(server) for _ in range(2)]
        victim = next(worker for worker in server.workers() if worker.number == streams[0].worker)
        os.kill(victim.pid, signal.SIGTERM)
        assert all(all_results([Thread(stream.finishes) for stream in streams]))
        wait_for_end([victim.pid])
        wait_until(lambda: len(server.pids()) == 2)
        # The list has its last requests, too.
        entries = server.client.get("/requests").json()["data"]
        assert {stream.worker for stream in streams} <= {entry["worker"] for entry in entries[:2]}


def children() -> list[int]:
    """Processes that this one has started."""
    return [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


def test_a_worker_with_weights_of_its_own_maps_no_file(tmp_path: Path) -> None:
    """On several NUMA nodes. Both models of a worker are placed so."""
    encoder, _ = bert_model(tmp_path / "bert.gguf", n_ctx=512)
    maps: dict[bool, str] = {}

    def look() -> None:
        for pid in children():
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if "--worker" in command:
                maps['"own_weights": true' in command] = Path(f"/proc/{pid}/maps").read_text()
        os.kill(os.getpid(), signal.SIGTERM)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = [
            Placement(share, None, own) for share, own in zip(core_shares(2), (True, False), strict=True)
        ]
        Supervisor(command_with(["serve", "--embeddings", str(encoder)]), listener, where, look, 0).run()
    assert lp.demo_model_path().name in maps[False]
    assert "bert.gguf" in maps[False]
    assert ".gguf" not in maps[True]


def refuses(server: WorkerServer) -> bool:
    try:
        server.client.get("/health")
    except httpx.TransportError:
        return True
    return False


class TestTheEnd:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_running_requests_are_answered(self, tmp_path: Path, number: signal.Signals) -> None:
        """After SIGTERM, and also when the supervisor is killed: the workers notice and end."""
        with worker_server(2, *OPTIONS, log=tmp_path / "log") as server:
            pids = server.pids()
            streams = [LongStream(server) for _ in range(2)]
            assert {stream.worker for stream in streams} == {0, 1}
            server.process.send_signal(number)
            wait_until(lambda: refuses(server))
            assert all(all_results([Thread(stream.finishes) for stream in streams]))
            wait_for_end(pids)
            assert server.process.wait(120) == (0 if number == signal.SIGTERM else -number)

    def test_a_second_signal_cancels(self, tmp_path: Path) -> None:
        with worker_server(1, *OPTIONS, log=tmp_path / "log") as server:
            pids = server.pids()
            stream = LongStream(server)
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: refuses(server))
            server.process.send_signal(signal.SIGINT)
            assert not stream.finishes()
            assert server.process.wait(120) == 0
            wait_for_end(pids)

    def test_a_closed_terminal_ends_the_server(self, tmp_path: Path) -> None:
        ours, theirs = pty.openpty()
        program = (
            "import fcntl, signal, sys, termios, llamapipe_command as command\n"
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and the server would run on\n"
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            "sys.exit(command.main())"
        )
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(
                [sys.executable, "-c", program, "serve", "--workers", "1", "--port", "0"],
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                cwd=tmp_path,
                env=environment(),
            ) as process,
        ):
            try:
                os.close(theirs)
                assert process.stdout is not None
                assert b"with 1 worker" in process.stdout.readline()
                os.close(ours)
                assert process.wait(120) == 0
            finally:
                process.kill()


class TestFailures:
    @pytest.mark.parametrize(
        ("options", "status", "text"),
        [
            (("-m", "BROKEN"), 1, "broken.gguf"),
            (("--n-ctx", "-5"), 2, "--n-ctx is -5"),
            (("--workers", "100000"), 2, "this process may use"),
            (("--workers", "0"), 2, "'auto'"),
        ],
    )
    def test_what_cannot_be_served_is_one_error(
        self, tmp_path: Path, options: tuple[str, ...], status: int, text: str
    ) -> None:
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF" + bytes(100))
        options = tuple(str(broken) if option == "BROKEN" else option for option in options)
        done = subprocess.run(
            [sys.executable, "-m", "llamapipe", "serve", "--workers", "2", "--port", "0", *options],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        errors = [line for line in done.stderr.splitlines() if line.startswith("llamapipe")]
        assert "Traceback" not in done.stderr
        assert done.returncode == status, done.stderr
        assert len(errors) == 1, done.stderr
        assert text in errors[0]

    def test_workers_that_always_end_at_once_end_the_server(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            supervisor = Supervisor(
                [sys.executable, "-S", "-c", "raise SystemExit(3)"],
                listener,
                [Placement(CoreShare((), 1))] * 2,
                announce=lambda: pytest.fail("they are not ready"),
                n_requests=0,
                backoff=lambda: Backoff(first_s=0.001, n_attempts=3),
            )
            with pytest.raises(WorkerFailedError, match=r"ended 3 times before it could serve.*status 3"):
                supervisor.run()
