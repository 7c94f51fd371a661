"""``llamapipe serve``: runs an HTTP server for clients of OpenAI's API."""

from __future__ import annotations

import argparse
import errno
import logging
import mmap
import os
import re
import socket as socket_module
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from socket import gaierror, gethostname
from typing import TYPE_CHECKING, Any

import llamapipe as lp
from llamapipe._messages import nearest
from llamapipe._options import ACCESS, BY_NAME, LIMITS, SERVER, Option
from llamapipe.arguments import path_of
from llamapipe.cli.options import (
    ENGINE,
    MODEL,
    SAMPLING,
    add_adapters,
    add_chat_template,
    add_engine_options,
    add_model,
    add_options,
    add_to_group,
    byte_count,
    defaults_of,
    for_commands,
    load_adapters,
    model_path,
    open_engine,
    open_model,
    read_options,
    template_problem,
    text_or_file,
)
from llamapipe.cli.parser import UsageError, usage_errors
from llamapipe.cli.ps import KEY_VARIABLE
from llamapipe.gguf.reader import parse_head
from llamapipe.host.cores import core_shares, set_group_nice, yielding
from llamapipe.host.folders import private_folder
from llamapipe.host.memory import free_memory, memory_limit
from llamapipe.ollama_models import PREFIX as OLLAMA
from llamapipe.ollama_models import display_name, model_of, stored_model
from llamapipe.structured.compile import prepare_vocabulary

if TYPE_CHECKING:
    from socket import socket

    from llamapipe.fleet.catalog import ModelEntry
    from llamapipe.fleet.link import ServedModel, WorkerOptions
    from llamapipe.server import ServerSettings
    from llamapipe.server.mcp.servers import McpServers

USAGE = "llamapipe serve [options]"
DESCRIPTION = (
    "Serve a model over HTTP to clients of OpenAI's, Anthropic's and Ollama's APIs. Without -m, use the bundled "
    "model."
)
EPILOG = """\
examples:
  llamapipe serve
  llamapipe serve -m model.gguf --n-seq-max 32 --n-ctx 8192
  llamapipe serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt
  llamapipe serve -m model.gguf --workers auto
  llamapipe serve --models models.toml --memory 6GiB
  llamapipe serve --models ollama: --ollama 11434

After SIGTERM or Ctrl-C the server finishes running requests and exits with 0. A second signal cancels them.
With --models, SIGHUP reads the list of models again.
With --workers, SIGHUP replaces the workers one by one; the new ones read the model and the other files again.
The server speaks plain HTTP: use a proxy for TLS, as docs/guides/deployment.md shows."""
_log = logging.getLogger("llamapipe.server")
_SAME_PORT = -1
_MAX_QUEUE = 1024
# Seconds after which a thread must hand over the interpreter's lock to one that waits. The engine thread needs the lock
# several times per step; with Python's 5 ms, parsing a long chat meanwhile delays all streams by tens of ms.
_SWITCH_S = 0.0005
_OF_FREE_MEMORY = 0.9  # of free memory, the share that several models may take together
# Options that the model of --embeddings also takes if -m is given; others depend on a model's size.
_OF_BOTH = ("use_mmap", "kernels", "packed_cache", "devices")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    _add_models(parser)
    _add_server(parser.add_argument_group("server"))
    _add_access(parser.add_argument_group("what clients may do"))
    _add_limits(parser.add_argument_group("limits"))
    defaults = defaults_of(lp.SamplingParams)
    add_options(parser, "sampling, where a request says nothing", sampling_defaults(), defaults)
    _add_kv_events(parser)
    add_engine_options(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_adapters(parser, "clients use its name as a model's")
    parser.add_argument(
        "--models",
        action="append",
        metavar="SOURCE",
        help="serve several models, each in a process that is started when a request names it: a folder of GGUF files, "
        "a TOML file that lists models, 'ollama:' (all that Ollama has downloaded), 'hf:' (all in the Hugging Face "
        "Hub's cache) or hf:OWNER/REPO:QUANT; several times: all of them",
    )
    parser.add_argument(
        "--memory",
        type=byte_count,
        metavar="SIZE",
        help="with --models: end the least recently used idle models so that all take no more of the system's memory "
        "than this, such as 6GiB (default: nine tenths of what is free; of GPUs' memory, always that)",
    )
    parser.add_argument(
        "--embeddings", type=model_path, metavar="FILE", help="a GGUF file for /v1/embeddings and /v1/rerank"
    )
    add_chat_template(parser)
    parser.add_argument(
        "--tool-calls",
        choices=("lenient", "strict"),
        default="lenient",
        help="lenient: also take plain JSON that names a given tool as a call; strict: only what the template "
        "marks (default: lenient)",
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    group.add_argument(
        "--port",
        type=int,
        default=8080,
        metavar="N",
        help="port to listen on; 0: any free port (default: 8080)",
    )
    group.add_argument(
        "-a",
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model for clients (repeatable)",
    )
    group.add_argument(
        "--embeddings-alias", action="append", default=[], metavar="NAME", help="the same for --embeddings"
    )
    group.add_argument(
        "--ollama",
        type=int,
        nargs="?",
        const=_SAME_PORT,
        metavar="PORT",
        help="also serve Ollama's API; with a number, on that port as well, which its clients expect to be 11434",
    )
    group.add_argument(
        "--workers",
        type=_workers,
        metavar="N",
        help="run N processes, each with its own model, engine and cores; 'auto': one per GPU or NUMA node",
    )
    group.add_argument("--worker", type=_worker_options, help=argparse.SUPPRESS)  # the options of a worker
    group.add_argument("--mcp-link", type=path_of, help=argparse.SUPPRESS)  # where a worker asks MCP servers
    _add_settings(group, SERVER)


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key-file",
        type=path_of,
        metavar="FILE",
        help=f"require an API key from this file, one key per line, or from the variable {KEYS_VARIABLE}",
    )
    _add_settings(group, ACCESS)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-queue",
        type=int,
        metavar="N",
        help=f"{BY_NAME['max_queue'].help} (default: {_MAX_QUEUE})",
    )
    _add_settings(group, LIMITS)


def _add_settings(group: argparse._ArgumentGroup, rows: Sequence[Option]) -> None:
    """Add the options of ``ServerSettings``, with its defaults in their help."""
    from llamapipe.server.settings import ServerSettings

    add_to_group(group, for_commands(*rows), defaults_of(ServerSettings))


def _add_kv_events(parser: argparse.ArgumentParser) -> None:
    events = parser.add_argument_group("KV events: what the prefix cache holds, for routers")
    events.add_argument(
        "--kv-events", metavar="ADDRESS", help="publish them over ZeroMQ, for example at tcp://127.0.0.1:5557"
    )
    events.add_argument(
        "--kv-events-connect", action="store_true", help="connect to that address instead of listening there"
    )
    events.add_argument("--kv-events-replay", metavar="ADDRESS", help="answer requests for missed ones here")
    events.add_argument("--kv-events-topic", metavar="TEXT", help="their topic (kv@HOSTNAME@MODEL)")
    events.add_argument("--kv-block-size", type=int, metavar="N", help="tokens in a block (16)")


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from llamapipe.server import ServerSettings, run_server

    number = "" if args.worker is None else f"worker={args.worker.index} "
    if args.worker is not None and args.worker.served is not None:
        number = f"model={args.worker.served.names[0]} "
        _take_served_model(args, args.worker.served)
    logging.basicConfig(format=f"%(asctime)s {number}%(message)s", stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("llamapipe.server").setLevel(logging.INFO)
    try:
        settings = ServerSettings(**settings_fields(args))
    except (TypeError, ValueError) as error:
        raise UsageError(with_option_name(str(error))) from error
    if args.worker is None and (store := settings.open_store()) is not None:
        store.close()  # its problems are told before a model is loaded
        if (files := settings.open_files()) is not None:
            files.close()
    if settings.mcp is not None:
        _check_mcp(path_of(settings.mcp))
    if settings.mcp_urls:
        _check_package("mcp", "mcp", "--mcp-url")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is {args.port}; it must be from 0 to 65535")
    has_second_port = args.ollama not in (None, _SAME_PORT)
    if has_second_port and not 0 <= args.ollama <= 65535:
        raise UsageError(f"--ollama is {args.ollama}; a port is from 0 to 65535")
    if has_second_port and args.workers is not None:
        raise UsageError(f"--ollama PORT and --workers do not go together: use --ollama --port {args.ollama}")
    if (args.workers, args.models) != (None, None) and not hasattr(socket_module, "send_fds"):
        raise UsageError(
            "--workers and --models start processes that are given open connections, which this system does not do: "
            "start a server for each model, with its own port"
        )
    if args.embeddings_alias and args.embeddings is None and args.models is None:
        raise UsageError("--embeddings-alias needs --embeddings FILE")
    events = _kv_events(args, settings)
    if events and (args.worker is not None or args.workers is not None):
        raise UsageError(
            "--kv-events and --workers do not go together: start a server for each, with its own ports"
        )
    _check_extras(args)
    sys.setswitchinterval(_SWITCH_S)
    if args.models is not None and args.worker is None:
        return _serve_models(args, settings)
    if args.memory is not None and args.models is None:
        raise UsageError("--memory needs --models")
    if args.worker is not None:
        return _run_worker(args, settings)
    if args.workers is not None:
        return _supervise(args, settings)
    with ExitStack() as stack:
        sock = stack.enter_context(listening_socket(args.host, args.port))
        more = []
        if has_second_port:
            more.append(stack.enter_context(listening_socket(args.host, args.ollama, "--ollama")))
        engine, embedder = stack.enter_context(_open_served(args, events))
        assert engine is not None
        model = engine.model
        announce(settings, sock, model.name, template_problem(model) is None, 0, engine.kv_events, *more)
        run_server(engine, sock, settings, embedder, more)
    return 0


def _check_extras(args: argparse.Namespace) -> None:
    """Raise UsageError for a missing package that only a request, perhaps hours later, would need."""
    needed = [("jinja2", "server", "chat"), ("llguidance", "server", "JSON schemas and tools")]
    if getattr(args, "allow_pull", False):
        needed.append(("huggingface_hub", "hub", "--allow-pull"))
    for package, extra, what in needed:
        _check_package(package, extra, what)


def _check_mcp(file: Path) -> None:
    """Raise UsageError if the file of MCP servers cannot be used."""
    from llamapipe.server.mcp.file import entries_of

    try:
        entries_of(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"--mcp: {error}") from error
    _check_package("mcp", "mcp", "--mcp")


def _check_package(package: str, extra: str, what: str) -> None:
    try:
        import_module(package)
    except ImportError:
        raise UsageError(
            f"{what} needs {package}, which is not installed: pip install 'llamapipe[{extra}]'"
        ) from None


def _check_media(model: lp.Model, is_asked: bool) -> None:
    """Check that a projector's images can be decoded. Raises UsageError if it was asked for; otherwise warns."""
    if not model.supports_images:
        return
    try:
        _check_package("PIL", "media", "--mmproj: decoding images")
    except UsageError as error:
        if is_asked:
            raise
        print(f"llamapipe: requests with images will be refused: {error}", file=sys.stderr)


class _Report:
    """Reports to the supervisor how much of the model is loaded, each percent once."""

    def __init__(self, worker: WorkerOptions) -> None:
        self._worker = worker
        self._percent = 0

    def __call__(self, fraction: float) -> None:
        """Report progress while the model loads."""
        if int(100 * fraction) > self._percent:
            self._percent = int(100 * fraction)
            self._worker.report_progress(fraction)


@contextmanager
def _open_served(
    args: argparse.Namespace, more: dict[str, Any] | None = None, **placement: Any
) -> Iterator[tuple[lp.Engine | None, lp.Embedder | None]]:
    """Open the engine and the embedder; a process for one of several models has only one of the two.

    ``more``: options of the engine, unless ``args`` has others; ``placement``: options of both models.
    """
    model_options = {
        "chat_template": args.chat_template,
        "tool_calls": args.tool_calls,
        **read_options(args, MODEL),
        **placement,
    }
    max_queue = _MAX_QUEUE if args.max_queue is None else args.max_queue
    engine_options = {"max_queue": max_queue, **(more or {}), **read_options(args, ENGINE)}
    served = None if args.worker is None else args.worker.served
    report = None if args.worker is None else _Report(args.worker)
    engine = embedder = None
    with ExitStack() as stack:
        file = args.model
        if served is not None and served.embeds:
            file, model_options = args.embeddings, {**read_options(args, MODEL), **placement}
        embeds = served is not None and served.embeds

        def load() -> lp.Model:
            model = open_model(file, model_options, args.worker is None, report)
            if not embeds:
                prepare_vocabulary(model.vocab)
            return model

        model = stack.enter_context(yielding(load) if served is not None and served.yields else load())
        if served is not None and embeds:
            embedder = stack.enter_context(lp.Embedder(model, n_ctx=served.options.get("n_ctx")))
            yield engine, embedder
            return
        problem = template_problem(model, args.chat_template)
        if problem is not None and (args.worker is None or args.worker.index == 0):
            print(
                f"llamapipe: {problem}: chat requests will be refused with status 400; give a template with "
                "--chat-template FILE",
                file=sys.stderr,
            )
        _check_media(model, getattr(args, "mmproj", "auto") not in ("auto", "off"))
        load_adapters(model, args)
        engine = stack.enter_context(open_engine(model, engine_options))
        if args.embeddings is not None:
            shared = {name: model_options[name] for name in _OF_BOTH if name in model_options}
            encoder = stack.enter_context(lp.Model(args.embeddings, **shared))
            embedder = stack.enter_context(lp.Embedder(encoder))
        yield engine, embedder


def _supervise(args: argparse.Namespace, settings: ServerSettings) -> int:
    """Run the workers. Only they load the model; this process loads no part of llama.cpp."""
    from llamapipe.fleet.command import command_with
    from llamapipe.fleet.placement import placements
    from llamapipe.fleet.supervisor import Supervisor, WorkerFailedError

    with usage_errors("--workers: "):
        where = placements(args.workers or None, use_gpus=read_options(args, MODEL).get("n_gpu_layers") != 0)
    given_path = lp.demo_model_path() if args.model is None else args.model
    path, name = model_of(given_path) or (given_path, display_name(given_path))

    def show() -> None:
        chats = args.chat_template is not None or has_template(path)
        announce(settings, sock, name, chats, len(where))

    with listening_socket(args.host, args.port) as sock, _mcp_for_others(args, settings) as argv:
        try:
            Supervisor(command_with(argv), sock, where, show, settings.keep_requests).run()
        except WorkerFailedError as error:
            if error.is_usage:
                raise UsageError(str(error)) from error
            raise
    return 0


@contextmanager
def _mcp_for_others(args: argparse.Namespace, settings: ServerSettings) -> Iterator[list[str]]:
    """Start the MCP servers here, and yield the command-line arguments for the processes that use them."""
    servers = settings.open_mcp()
    if servers is None:
        yield args.argv
        return
    from llamapipe.server.mcp.link import listening

    with closing(servers), listening(servers) as path:
        yield [*args.argv, "--mcp-link", str(path)]


def _run_worker(args: argparse.Namespace, settings: ServerSettings) -> int:
    """Serve the connections that the supervisor hands over, and let it show errors."""
    from llamapipe.fleet.worker import Worker, run_worker

    worker = Worker(args.worker)
    options: dict[str, Any] = {} if args.worker.devices is None else {"devices": args.worker.devices}
    if args.worker.own_weights and getattr(args, "packed_cache", "off") == "off":
        options["use_mmap"] = False
    kept = _cache_options(args)
    try:
        with _open_served(args, kept, **options) as (engine, embedder):
            if engine is not None and kept:  # nobody has asked for writes while it runs
                engine.set_cache_writes("never")
            if args.worker.served is not None and args.worker.served.yields:
                set_group_nice(os.getpid(), yields=False)
            run_worker(engine, worker, args.host, settings, embedder, _link_mcp(args))
            if engine is not None and kept and worker.keeps_cache:
                engine.set_cache_writes("at_close")
    except (UsageError, lp.errors.LlamapipeError, OSError, ValueError, ImportError) as error:
        if not worker.is_serving:
            args.worker.report_failure(str(error) or type(error).__name__, isinstance(error, UsageError))
            return 1
        raise
    return 0


def _link_mcp(args: argparse.Namespace) -> McpServers | None:
    """Return the MCP servers of the process that started this worker. Raises OSError."""
    if args.mcp_link is None:
        return None
    from llamapipe.server.mcp.link import LinkedServers

    return LinkedServers(args.mcp_link)


def _cache_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options for the folder that keeps an unloaded model's cached prefixes.

    There are none if the operator gave another folder, or no memory for cached prefixes.
    """
    served, options = args.worker.served, read_options(args, ENGINE)
    n_bytes = options.get("cache_bytes")
    if served is None or served.cache_dir is None or "cache_dir" in options or n_bytes == 0:
        return {}
    try:
        Path(served.cache_dir).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:  # no reason not to serve the model
        _log.warning("cached prefixes are not kept: %s", error)
        return {}
    most = {} if n_bytes is None else {"cache_dir_bytes": max(n_bytes, 2**20)}
    return {"cache_dir": served.cache_dir, **most}


def _serve_models(args: argparse.Namespace, settings: ServerSettings) -> int:
    """Serve several models, each in a separate process; this process loads no part of llama.cpp."""
    from llamapipe.cli._models_file import entries_of, look, sees_images
    from llamapipe.fleet.budget import Budget
    from llamapipe.fleet.command import command_with
    from llamapipe.fleet.front import FrontServer
    from llamapipe.fleet.placement import Placement, free_gpu_memory
    from llamapipe.fleet.pool import Pool
    from llamapipe.server.run import host_of

    for option, value in (
        ("-m", args.model),
        ("--embeddings", args.embeddings),
        ("--workers", args.workers),
        ("--kv-events", args.kv_events),
        ("--alias", args.alias or None),
        ("--embeddings-alias", args.embeddings_alias or None),
        ("--chat-template", args.chat_template),
        ("--draft", getattr(args, "draft", None)),
        ("--mmproj", getattr(args, "mmproj", None)),
        ("--lora", args.lora or None),
        ("--control-vector", args.control_vector or None),
        ("--lora-path", getattr(args, "lora_path", None)),
        ("--any-model-name", getattr(args, "any_model_name", None) or None),
    ):
        if value is not None:
            raise UsageError(
                f"{option} and --models do not go together; a TOML file gives each model what it needs"
            )
    entries = entries_of(args.models, getattr(args, "allow_pull", False))
    for entry in entries:
        if any(str(file).startswith("hf:") for file in (entry.file, *entry.options.values())):
            _check_package("huggingface_hub", "hub", f"--models: {entry.name}")
        if sees_images(entry):
            _check_package("PIL", "media", f"--models: mmproj of {entry.name}")
        if entry.is_local and not entry.file.startswith(OLLAMA) and not Path(entry.file).exists():
            _log.warning(
                "--models: the file of %s does not exist: %s; requests for it get 503", entry.name, entry.file
            )
    free, most = free_memory(), memory_limit()
    if args.memory is not None and most is not None and args.memory > most:
        raise UsageError(
            f"--memory is {args.memory / 2**30:.1f} GiB; this machine gives processes at most {most / 2**30:.1f} GiB"
        )
    budget = args.memory or (None if free is None else int(free * _OF_FREE_MEMORY))
    gpu_budget = int(free_gpu_memory() * _OF_FREE_MEMORY) or None
    common = read_options(args, [*ENGINE, *MODEL])

    def again() -> list[ModelEntry]:
        try:
            return entries_of(args.models, getattr(args, "allow_pull", False))
        except UsageError as error:
            raise ValueError(str(error)) from error

    with ExitStack() as stack:
        folder = None
        try:
            if "cache_dir" not in common:
                folder = stack.enter_context(private_folder("evicted"))
        except (OSError, RuntimeError) as error:
            _log.warning("the cached prefixes of models that are ended are lost: %s", error)
        with usage_errors("--models: "):
            argv = stack.enter_context(_mcp_for_others(args, settings))
            pool = Pool(
                entries,
                command_with(argv),
                Placement(core_shares(1)[0]),
                partial(look, common, has_gpus=gpu_budget is not None),
                Budget(budget, gpu_budget),
                folder,
                common.get("cache_dir"),
                settings.keep_requests,
            )
        sock = stack.enter_context(listening_socket(args.host, args.port))
        more = []
        if args.ollama not in (None, _SAME_PORT):
            more.append(stack.enter_context(listening_socket(args.host, args.ollama, "--ollama")))
        first = entries[0].name if entries else "NAME"
        announce(settings, sock, first, True, 0, None, *more, n_models=len(entries))
        FrontServer(settings, pool, again, host_of(sock)).run_program([sock, *more])
    return 0


def _take_served_model(args: argparse.Namespace, served: ServedModel) -> None:
    """Set the options of one of several models, in the process that runs it."""
    for name, value in served.options.items():
        setattr(args, name, value)
    if served.embeds:
        args.embeddings, args.embeddings_alias = Path(served.file), [*served.names]
    else:
        args.model, args.alias = Path(served.file), [*served.names]
    args.api_key_file = None  # the front process has checked the key


def _workers(text: str) -> int:
    """Return the number of workers; 0 for 'auto'."""
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number from 1 up nor 'auto'")
    return int(text)


def _worker_options(text: str) -> WorkerOptions:
    from llamapipe.fleet.link import WorkerOptions

    return WorkerOptions.parse(text)


def _kv_events(args: argparse.Namespace, settings: ServerSettings) -> dict[str, Any]:
    """Return the engine option ``kv_events`` if it was requested."""
    values = {
        "replay_endpoint": args.kv_events_replay,
        "topic": args.kv_events_topic,
        "connect": args.kv_events_connect or None,
        "block_size": args.kv_block_size,
    }
    fields = {name: value for name, value in values.items() if value is not None}
    if args.kv_events is None:
        if fields:
            raise UsageError("options for KV events need --kv-events ADDRESS")
        return {}
    if settings.model_names and args.kv_events_topic is None:
        fields["topic"] = f"kv@{gethostname()}@{settings.model_names[0]}"
    with usage_errors("--kv-events: "):
        return {"kv_events": lp.KvEvents(args.kv_events, **fields)}


# ---- from options to settings
KEYS_VARIABLE = "LLAMAPIPE_API_KEYS"
# Fields whose options are more than the field.
_OPTIONS = {
    "model_names": "--alias",
    "embedding_names": "--embeddings-alias",
    "api_keys": "--api-key-file",
}


def settings_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``ServerSettings`` that were given."""
    is_model = args.worker is not None and args.worker.served is not None
    values: dict[str, Any] = {
        "model_names": tuple(args.alias),
        "embedding_names": tuple(args.embeddings_alias),
        "api_keys": () if is_model else _keys(args.api_key_file),
        "ollama": args.ollama is not None,
    }
    known = sampling_defaults()
    sampling = read_options(args, known)
    stored = None if args.model is None else stored_model(args.model)
    if stored is not None:  # as in Ollama
        names = {option.name for option in known}
        sampling = {k: v for k, v in stored.sampling.items() if k in names} | sampling
        if text := stored.text("system"):
            values["system"] = text
    if sampling:
        values["sampling"] = sampling
    values |= read_options(args, for_commands(*SERVER, *ACCESS, *LIMITS))
    if args.worker is not None:
        values.pop("mcp", None)  # the servers are those of the process that started this one
    if getattr(args, "system", None) is not None:  # also that of a models' file, which no parser has read
        try:
            values["system"] = text_or_file(values["system"]).removesuffix("\n")
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--system: {error}") from error
    return values


def sampling_defaults() -> list[Option]:
    """Return the sampling options that apply if a request does not set them."""
    from llamapipe.server.settings import DEFAULTS

    names = {option.name for option in DEFAULTS}
    return [option for option in SAMPLING if option.name in names]


def with_option_name(message: str) -> str:
    """Return a message of ``ServerSettings`` that begins with a field's name, with the option's name in its place."""
    from llamapipe.server import ServerSettings

    field = re.split(r"\W", message, maxsplit=1)[0]
    if field not in ServerSettings.__dataclass_fields__:
        return message
    option = _OPTIONS.get(field) or (BY_NAME[field].flags[-1] if field in BY_NAME else f"--{field}")
    return option + message[len(field) :]


def _keys(path: Path | None) -> tuple[str, ...]:
    """Read the keys of the file and of the environment. A misspelt variable is an error, not a server without keys."""
    prefix = "LLAMAPIPE_"
    known = KEYS_VARIABLE.removeprefix(prefix)
    for name in os.environ.keys() - {KEY_VARIABLE}:
        # Without what all variables of llamapipe have in common, which would make any two of them alike.
        if name.startswith(prefix) and name != KEYS_VARIABLE and nearest(name.removeprefix(prefix), [known]):
            raise UsageError(f"the variable {name} is unknown; did you mean {KEYS_VARIABLE}?")
    keys = []
    if KEYS_VARIABLE in os.environ:
        keys = [key for key in os.environ[KEYS_VARIABLE].split(",") if key.strip()]
        if not keys:
            raise UsageError(f"{KEYS_VARIABLE} holds no key; unset the variable to serve without keys")
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise UsageError(f"--api-key-file: {path} is not UTF-8 text") from None
        file_keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not file_keys:
            raise UsageError(f"--api-key-file: {path} holds no key")
        keys += file_keys
    stripped = tuple(key.strip() for key in keys)
    if not stripped and KEY_VARIABLE in os.environ:
        raise UsageError(
            f"the variable {KEY_VARIABLE} is what llamapipe ps and stop send, and this server has no keys; put them "
            f"into {KEYS_VARIABLE} or --api-key-file, or unset the variable"
        )
    return stripped


# ---- the start
_ANNOUNCEMENT = """\
llamapipe serves {what} at {url}{workers}

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
{call}

{ollama}{page}{events}Press Ctrl-C to stop the server."""
_CHAT = """\
  answer = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "Hello"}}])
  print(answer.choices[0].message.content)"""
_COMPLETION = """\
  answer = client.completions.create(model="{model}", prompt="Once upon a time", max_tokens=64)
  print(answer.choices[0].text)"""


def listening_socket(host: str, port: int, option: str = "--port") -> socket:
    """Open a socket that listens on the address. Raises OSError, which names the option to change."""
    from llamapipe.server import bound_socket

    try:
        return bound_socket(host, port)
    except gaierror as error:
        raise OSError(f"--host {host} is not a valid address: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            who = "; is Ollama running? Stop it, or" if option == "--ollama" else ";"
            raise OSError(f"{host}:{port} is in use{who} choose another port with {option}") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(f"--host {host} is not an address of this machine") from error
        if error.errno == errno.EACCES:
            raise OSError(
                f"port {port} needs root privileges; choose a port of 1024 or higher with {option}"
            ) from error
        raise


def has_template(path: Path) -> bool:
    """Return whether a GGUF file, which was loaded before, has a chat template. Does not use llama.cpp."""
    with path.open("rb") as file:
        head = parse_head(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return "tokenizer.chat_template" in head.entries


def announce(
    settings: ServerSettings,
    sock: socket,
    stem: str,
    can_chat: bool,
    n_workers: int = 0,
    events: lp.KvEvents | None = None,
    *more: socket,
    n_models: int = 1,
) -> None:
    """Print the server's address and an example of a request. ``more``: sockets for Ollama's clients."""
    host = sock.getsockname()[0]
    url = _url(sock)
    model = (settings.model_names or (stem,))[0]
    # The warnings come first: a program that waits for the address can then read them.
    if not settings.api_keys and host not in ("127.0.0.1", "::1"):
        print(
            f"llamapipe: {host} can be reached from other machines, and no API key is required",
            file=sys.stderr,
        )
    for line in _variable_notes(settings):
        print(f"llamapipe: {line}", file=sys.stderr)
    print(
        _ANNOUNCEMENT.format(
            model=model,
            url=url,
            key="YOUR KEY" if settings.api_keys else "none",
            call=(_CHAT if can_chat else _COMPLETION).format(model=model),
            what=model if n_models == 1 else f"{n_models} models",
            workers=f" with {n_workers} worker{'s' * (n_workers > 1)}" if n_workers else "",
            page=f"In a browser: {url}    " if settings.page else "",
            ollama=f"For Ollama's clients: OLLAMA_HOST={_url([*more, sock][0])}\n" if settings.ollama else "",
            events=_where(events),
        ),
        flush=True,
    )


# Variables that other servers read. A deployment that moves here may count on them.
_KEYS_ELSEWHERE = ("LLAMA_API_KEY", "VLLM_API_KEY")
_OF_OLLAMA = tuple(
    f"OLLAMA_{name}"
    for name in (
        "CONTEXT_LENGTH", "KEEP_ALIVE", "KV_CACHE_TYPE", "MAX_LOADED_MODELS", "MAX_QUEUE", "NUM_PARALLEL", "ORIGINS",
    )
)  # fmt: skip


def _variable_notes(settings: ServerSettings) -> Iterator[str]:
    """Yield what to say about variables of other servers, which are not read here."""
    for name in _KEYS_ELSEWHERE:
        if name in os.environ and not settings.api_keys:
            yield f"{name} is set, and no API key is required: this server reads {KEYS_VARIABLE}, or --api-key-file"
    others = sorted(name for name in os.environ if name.startswith("LLAMA_ARG_"))
    if settings.ollama:
        others += [name for name in _OF_OLLAMA if name in os.environ]
    if others:
        yield f"these variables have no effect here: {', '.join(others)}; give options (llamapipe serve --help)"


def _url(sock: socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{'[' + host + ']' if ':' in host else host}:{port}"


def _where(events: lp.KvEvents | None) -> str:
    """Return a line about where KV events are published."""
    if events is None:
        return ""
    replay = f", missed ones at {events.replay_endpoint}" if events.replay_endpoint else ""
    return f"KV events at {events.endpoint}{replay}\n"
