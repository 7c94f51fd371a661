"""Models on RPC workers: real processes on this machine's loopback, and servers that answer wrongly."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.gguf_models import Shape, make_model
from support.rpc_workers import server, worker
from support.run_script import environment, run_script

import llamapipe as lp
from llamapipe import rpc
from llamapipe.cli import main
from llamapipe.errors import BackendError
from llamapipe.native.load import native
from llamapipe.rpc import ANSWER, ANSWER_BYTES, REQUEST, Address, check_worker

PROMPTS = ["Once upon a time", "Question: What does a cow say?\nAnswer:", "One, two,"]
GREEDY = lp.SamplingParams(max_tokens=32, temperature=0)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[str]]:
    """Two that all tests share, one after another."""
    with worker() as (first, _), worker() as (second, _):
        yield [first, second]


def tokens(model: lp.Model) -> list[tuple[int, ...]]:
    with lp.Engine(model, n_threads=1, n_ctx=256, n_seq_max=4) as engine:
        return [tuple(out.token_ids) for out in engine.generate(PROMPTS, GREEDY)]


def load(rpc: Sequence[str], **options: object) -> lp.Model:
    return lp.Model(lp.demo_model_path(), rpc=rpc, **options)  # type: ignore[arg-type]


# ---- results
@pytest.mark.parametrize(
    ("n", "options", "n_devices"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (2, {"tensor_split": [3, 1]}, 2),
        (2, {"n_gpu_layers": 2}, 2),
        (2, {"split_mode": "none", "main_gpu": 1}, 2),
        (1, {"devices": ["CPU"]}, 2),
    ],
)
def test_workers_give_the_tokens_of_one_process(
    demo: lp.Model, workers: list[str], n: int, options: dict[str, object], n_devices: int
) -> None:
    with load(workers[:n], **options) as model:
        far = [(d.description, d.backend, d.type) for d in model.devices[:n]]
        assert far == [(address, "RPC", "gpu") for address in workers[:n]] and len(model.devices) == n_devices
        assert tokens(model) == tokens(demo)


def test_devices_of_workers_are_of_their_model_only(demo: lp.Model, workers: list[str]) -> None:
    before = [device.name for device in lp.devices()]
    with load(workers):
        assert [device.name for device in lp.devices()] == before
        with lp.Model(lp.demo_model_path()) as other:
            assert all(device.backend != "RPC" for device in other.devices)
            assert tokens(other) == tokens(demo)


def test_the_library_is_opened_by_the_first_model_on_workers_only(workers: list[str]) -> None:
    program = """
import llamapipe as lp
def is_open():
    return "libllamapipe-rpc" in open("/proc/self/maps").read()
lp.Model.demo().close()
say(is_open())
with lp.Model(lp.demo_model_path(), rpc=sys.argv[1:]):
    say(is_open())
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("/proc/self/maps is Linux's")
    assert run_script(program, *workers).split() == ["False", "True"]


def test_packed_weights_on_disk_are_those_of_the_cpus_layers(
    demo: lp.Model, workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other devices write the file again; where nothing is left to the CPU, it stays as it is."""
    if demo.n_packed_tensors == 0:
        pytest.skip("this processor has no kernels")
    with load(workers[:1], n_gpu_layers=2, packed_cache=tmp_path) as model:
        assert 0 < model.packed_bytes < demo.packed_bytes and tokens(model) == tokens(demo)
        file = model.packed_file
        assert file is not None and list(tmp_path.iterdir()) == [file] and not caplog.records
    for _ in range(2):
        with lp.Model(lp.demo_model_path(), packed_cache=tmp_path) as model:
            assert model.packed_file == file and model.packed_bytes == demo.packed_bytes
            assert tokens(model) == tokens(demo)
    (record,) = caplog.records
    assert "for other devices" in record.message
    before = file.stat()
    with load(workers[:1], packed_cache=tmp_path) as model:
        assert model.packed_file is None and tokens(model) == tokens(demo)
    assert file.stat().st_ino == before.st_ino and len(caplog.records) == 1


# ---- one context at a time
def test_a_worker_belongs_to_one_model_and_a_model_has_one_context(workers: list[str]) -> None:
    with load(workers[:1]) as model:
        with pytest.raises(BackendError, match="is used by another model of this process"):
            load(workers[:1])
        with lp.Engine(model, n_threads=1, n_ctx=256):
            with pytest.raises(BackendError, match="has a context already"):
                lp.Engine(model, n_threads=1, n_ctx=256)
            with pytest.raises(BackendError, match="has a context already"):
                lp.Embedder(model, pooling="mean", n_ctx=64)
        with lp.Embedder(model, pooling="mean", n_ctx=64, n_threads=1) as embedder:
            assert embedder.embed("a cow").shape == (model.n_embd,)
    load(workers[:1]).close()


@pytest.mark.parametrize("options", [{"ring": "events"}, {"ring": "sync"}, {"graph_sampling": "on"}])
def test_options_that_workers_cannot_follow_are_refused(workers: list[str], options: dict[str, str]) -> None:
    with load(workers[:1]) as model, pytest.raises(ValueError, match="the model is on RPC workers"):
        lp.Engine(model, n_threads=1, n_ctx=256, tuning=lp.EngineTuning(**options))  # type: ignore[arg-type]


# ---- the handshake
def hello(size: int = ANSWER_BYTES, version: tuple[int, int, int] = (8, 0, 0)) -> bytes:
    return ANSWER.pack(size, *version, 0, b"")


def answering(data: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        assert connection.recv(len(REQUEST), socket.MSG_WAITALL) == REQUEST
        connection.sendall(data)

    return answer


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (hello(version=(6, 0, 0)), "speaks version 6.0.0 of ggml-rpc's protocol, and this build version 8.0"),
        (hello(version=(8, 1, 0)), "speaks version 8.1.0 of ggml-rpc's protocol, and this build version 8.0"),
        (hello(size=3), "answered 3 bytes instead of 28"),
        (
            b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
            "bytes instead of 28; it is no RPC worker",
        ),
        (b"", "closed the connection instead of answering"),
        (hello()[:-1], "closed the connection instead of answering"),
    ],
)
def test_other_versions_and_other_servers_are_refused(data: bytes, message: str) -> None:
    with server(answering(data)) as address, pytest.raises(BackendError, match=message):
        load([address])
    assert not rpc._open


def test_a_port_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(BackendError, match=f"refused.*llamapipe rpc-worker --port {port}"):
        load([f"127.0.0.1:{port}"])


@pytest.mark.parametrize("trickles", [False, True])
def test_a_server_that_does_not_answer_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch, trickles: bool
) -> None:
    def answer(connection: socket.socket) -> None:
        assert connection.recv(len(REQUEST), socket.MSG_WAITALL) == REQUEST
        connection.settimeout(0.05)  # a byte in every such pause does not prolong the wait
        while True:
            try:
                if not connection.recv(1):
                    return
            except TimeoutError:
                if trickles:
                    connection.sendall(b"\0")

    with server(answer) as address:
        host, port = address.split(":")
        with pytest.raises(BackendError, match=r"did not answer within 0\.5 s"):
            check_worker(Address(address, host, int(port)), (8, 0), timeout_s=0.5)
    assert rpc.TIMEOUT_S == 5


def test_the_version_is_that_of_the_build() -> None:
    lib = native().lib
    assert (lib.RPC_PROTO_MAJOR_VERSION, lib.RPC_PROTO_MINOR_VERSION) == (8, 0)


def test_addresses_in_the_network_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    rpc._warn([Address("127.0.0.1:1", "127.0.0.1", 1)])
    assert not caplog.records
    rpc._warn([Address("gpu:1", "10.0.0.2", 1)])
    assert "gpu:1 in the clear: RPC connections are neither authenticated nor encrypted" in caplog.text


# ---- the death of a worker
DYING = """
import llamapipe as lp
with lp.Model(lp.demo_model_path(), rpc=sys.argv[1:]) as model, lp.Engine(model, n_threads=1) as engine:
    with engine.stream("Once upon a time", lp.SamplingParams(max_tokens=400, ignore_eos=True)) as stream:
        next(stream)
        say("generating")
        sys.stdin.readline()
        for delta in stream if MORE else ():
            pass
say("finished")
"""


@pytest.mark.parametrize("more", [True, False], ids=["generating", "closing"])
def test_the_end_of_a_worker_ends_the_process_that_uses_it(more: bool) -> None:
    """Now, or when it frees the memory that it had there: a thread of ggml-rpc calls abort()."""
    preamble = f"import sys\nMORE = {more}\ndef say(t): print(t, flush=True)\n"
    with (
        worker() as (first, _),
        worker() as (second, victim),
        subprocess.Popen(
            [sys.executable, "-c", preamble + DYING, first, second],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as client,
    ):
        assert client.stdout is not None
        assert client.stdout.readline() == "generating\n"
        victim.kill()
        victim.wait()
        out, err = client.communicate("go\n", timeout=60)
    assert (client.returncode, out) == (-signal.SIGABRT, ""), err
    assert "llamapipe: an RPC worker ended or closed its connection" in err


def test_the_end_of_a_client_does_not_end_the_worker(demo: lp.Model) -> None:
    with worker() as (address, _):
        program = "import llamapipe as lp, os\nlp.Model(lp.demo_model_path(), rpc=sys.argv[1:])\nos._exit(0)"
        run_script(program, address)
        with load([address]) as model:
            assert tokens(model) == tokens(demo)


# ---- the command
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_worker_at_once(number: signal.Signals) -> None:
    with worker() as (_, process):
        process.send_signal(number)
        assert process.wait(10) == -number


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--host", "0.0.0.0"], 2, "neither authenticates nor encrypts"),
        (["--host", "192.0.2.1"], 2, "name who may, such as --allow-network"),
        (["--allow-network", "10.0.0.0/8"], 2, "--host is 127.0.0.1, which only this machine reaches"),
        (["--host", "192.0.2.1", "--allow-network", "10.0.0.1/8"], 2, "10.0.0.1/8 has host bits set"),
        (["--host", "192.0.2.1", "--allow-network", "fd00::/8"], 2, "give an IPv4 network"),
        (["--host", "::1"], 2, "uses IPv4 only"),
        (["--port", "65536"], 2, "must be from 0 to 65535"),
        (["--threads", "0"], 2, "--threads is 0"),
        (["--device", "GPU9"], 1, "there is no device 'GPU9'"),
        (["--host", "192.0.2.1", "--allow-network", "192.0.2.0/24"], 1, "cannot listen at 192.0.2.1"),
    ],
)
def test_what_a_worker_refuses(
    options: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rpc-worker", *options]) == status
    out, err = capsys.readouterr()
    assert not out and message in err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert main(["rpc-worker", "--port", str(sock.getsockname()[1])]) == 1
    assert "Address already in use" in capsys.readouterr().err


class Peer:
    """A client that writes messages of the protocol itself."""

    TENSOR = struct.Struct("<QIQ4I4II16ii10QQQQ64si")

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self.sock = socket.create_connection((host, int(port)), timeout=20)
        self.sock.sendall(REQUEST)
        assert len(self.receive(ANSWER.size)) == ANSWER.size

    def receive(self, n: int) -> bytes:
        """``n`` bytes; fewer if the worker closed the connection."""
        data = b""
        while len(data) < n and (part := self.sock.recv(n - len(data))):
            data += part
        return data

    def ask(self, command: int, data: bytes) -> bytes:
        """The answer; empty if the worker closed the connection instead."""
        self.sock.sendall(struct.pack("<BQ", command, len(data)) + data)
        size = self.receive(8)
        return self.receive(*struct.unpack("<Q", size)) if size else b""

    def tensor(self, buffer: int, data: int, n: int) -> bytes:
        """A message's tensor of ``n`` 32-bit floats at an address."""
        strides = [4, 4 * n, 4 * n, 4 * n]
        return self.TENSOR.pack(
            1, 0, buffer, n, 1, 1, 1, *strides, 0, *[0] * 16, 0, *[0] * 10, 0, 0, data, b"t", 0
        )


@pytest.mark.native
@pytest.mark.parametrize("place", ["below", "far below", "above", "inside"])
def test_a_copy_outside_a_buffer_is_refused(place: str) -> None:
    """CVE-2026-137567: a destination without elements was compared with the buffer's end only."""
    alloc, base, copy = 0, 3, 9
    with worker() as (address, process):
        peer = Peer(address)
        with peer.sock:
            buffer, size = struct.unpack("<QQ", peer.ask(alloc, struct.pack("<IQ", 0, 4096)))
            (start,) = struct.unpack("<Q", peer.ask(base, struct.pack("<Q", buffer)))
            where = {"below": start - 64, "far below": 64, "above": start + size, "inside": start + 1024}[
                place
            ]
            source = peer.tensor(buffer, start, 16)
            answer = peer.ask(copy, source + peer.tensor(buffer, where, 0))
            assert answer == (b"\1" if place == "inside" else b"")
        # The worker lives, and serves the next client.
        with Peer(address).sock:
            assert process.poll() is None


@pytest.mark.native
def test_a_graph_outside_of_buffers_is_refused() -> None:
    """CVE-2026-34159: a tensor of no buffer, or of one that does not exist, with an address."""
    graph_compute = 10
    with worker() as (address, process):
        for buffer in (0, 0x1000):
            peer = Peer(address)
            with peer.sock:
                node = struct.pack("<IQIQI", 0, 0, 1, 1, 1) + peer.tensor(buffer, 0x1000, 16)
                peer.sock.sendall(struct.pack("<BQ", graph_compute, len(node)) + node)
                assert (
                    peer.receive(1) == b""
                )  # it has no answer; a graph that was taken leaves the connection open
        with Peer(address).sock:
            assert process.poll() is None


def test_the_library_has_no_rdma() -> None:
    """CVE-2026-118375 is in code that is compiled in only with RDMA, which needs libibverbs."""
    assert b"ibv_" not in rpc.library().read_bytes()


def test_only_named_networks_reach_a_worker() -> None:
    """Sources on the loopback other than 127.0.0.1 stand for other machines."""
    with worker("--host", "0.0.0.0", "--allow-network", "127.0.0.8/30") as (address, process):
        assert address.startswith("0.0.0.0:") and process.stderr is not None
        said = process.stderr.readline()
        assert (
            "machines of 127.0.0.8/30 can connect" in said and "neither authenticated nor encrypted" in said
        )
        there = ("127.0.0.1", int(address.partition(":")[2]))
        for source in ("127.0.0.1", "127.0.0.8", "127.0.0.11"):
            socket.create_connection(there, timeout=20, source_address=(source, 0)).close()
        for source in ("127.0.0.7", "127.0.0.12"):
            with pytest.raises(TimeoutError):
                socket.create_connection(there, timeout=0.5, source_address=(source, 0))


def test_the_option_of_other_commands(workers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["generate", "--n-threads", "1", "--temperature", "0", "-n", "16", "Once upon a time"]

    def text(*options: str) -> str:
        assert main([*plain, *options]) == 0
        return capsys.readouterr().out

    assert text(*(arg for address in workers for arg in ("--rpc", address))) == text() != ""


def test_what_engines_do_with_cells_and_rows(demo: lp.Model, workers: list[str]) -> None:
    """Choices that share a prompt, log-probabilities, constraints, snapshots: copies of cells, rows and states."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    def results(model: lp.Model) -> list[object]:
        with lp.Engine(model, n_threads=1, n_ctx=256, n_seq_max=3) as engine:
            choices = engine.generate(
                PROMPTS[0], lp.SamplingParams(max_tokens=12, n=3, seed=5, temperature=1.0)
            )
            outputs: list[object] = [choice.token_ids for choice in choices.choices]
            scored = engine.generate(PROMPTS[0], lp.SamplingParams(max_tokens=8, temperature=0, logprobs=2))
            assert scored.logprobs is not None
            outputs.append([round(entry.logprob, 2) for entry in scored.logprobs])
            constrained = engine.generate(
                PROMPTS[1], lp.SamplingParams(max_tokens=40, json_schema=schema, seed=3)
            )
            outputs.append(constrained.text)
            generation = engine.start(PROMPTS[2], lp.SamplingParams(max_tokens=16, temperature=0))
            begun = [generation.next() for _ in range(4)]
            snapshot = generation.snapshot()
            generation.cancel()
            restored = engine.restore(snapshot, lp.SamplingParams(max_tokens=16, temperature=0))
            outputs.append([begun, [restored.next() for _ in range(4)]])
            restored.cancel()
            return outputs

    with lp.Model(demo.path, kernels="ggml") as plain:  # workers have ggml's kernels only
        expected = results(plain)
    with load(workers, kernels="ggml") as model:
        assert results(model) == expected


def test_a_folder_keeps_large_tensors(tmp_path: Path) -> None:
    shape = Shape(layers=1, width=64, heads=2, heads_kv=2, ffn=49152)  # tensors of 12 MiB
    path = make_model(tmp_path / "wide.gguf", shape=shape, type_name="f32", vocab="builtin-spm")
    cache = tmp_path / "cache"
    with lp.Model(path) as model:
        expected = tokens(model)
    with worker("--cache", str(cache)) as (address, _):
        for _ in range(2):
            with lp.Model(path, rpc=[address]) as model:
                assert tokens(model) == expected
            kept = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
            assert kept
    with worker("--cache", str(cache)) as (address, _), lp.Model(path, rpc=[address]) as model:
        assert tokens(model) == expected
    assert {file.name: file.stat().st_mtime_ns for file in cache.iterdir()} == kept
