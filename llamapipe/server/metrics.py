"""Prometheus metrics of a server: its requests, and the state of its engine at each scrape.

Routers (llm-d, the gateway API's inference extension, AIBrix) read the metrics whose names begin with ``vllm:``, by the
label ``model_name``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llamapipe.kv_events import BLOCK_SIZE

if TYPE_CHECKING:
    from llamapipe.engine import Engine
    from llamapipe.results import TimeHistogram
    from llamapipe.server._client_request import ClientRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


# Its name, labels and value.
Sample = tuple[str, dict[str, str], float]


class Family(NamedTuple):
    """The samples of one metric, as values that JSON can carry."""

    name: str
    text: str
    kind: str
    samples: list[Sample]


class Metrics:
    """The metrics of one server. Use it on the event loop's thread; ``text`` may run on another thread.

    ``engine``: None if the engines are in other processes.
    """

    def __init__(self, engine: Engine | None, model_name: str = "") -> None:
        self._registry = CollectorRegistry()
        if engine is not None:
            self._registry.register(_EngineCollector(engine, model_name))
        registry = self._registry
        self._requests = Counter(
            "llamapipe_requests", "Answered requests.", ["path", "status"], registry=registry
        )
        self._prompt = Counter("llamapipe_prompt_tokens", "Prompt tokens of answers.", registry=registry)
        self._completion = Counter(
            "llamapipe_completion_tokens", "Generated tokens of answers.", registry=registry
        )
        self._ttft = Histogram(
            "llamapipe_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._itl = Histogram(
            "llamapipe_inter_token_latency_seconds",
            "Between two tokens of a stream.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._total = Histogram(
            "llamapipe_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )

    def __repr__(self) -> str:
        return "<Metrics>"

    def answered(self, request: ClientRequest, seconds: float) -> None:
        """Count a request that was answered, refused or abandoned by the client."""
        self._requests.labels(request.route, str(request.status)).inc()
        self._total.labels(request.route).observe(seconds)
        if request.n_prompt_tokens:
            self._prompt.inc(request.n_prompt_tokens)
        if request.n_completion_tokens:
            self._completion.inc(request.n_completion_tokens)
        times = request.times
        if times.first_at is not None:
            self._ttft.observe(times.first_at - times.arrived_at)
        for interval_s in request.intervals_s:
            self._itl.observe(interval_s)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format; wait until the engine's current step has finished."""
        return generate_latest(self._registry)

    def families(self) -> list[Family]:
        """Return all metrics as values that JSON can carry."""
        return [
            Family(
                family.name,
                family.documentation,
                family.type,
                [(sample.name, dict(sample.labels), float(sample.value)) for sample in family.samples],
            )
            for family in self._registry.collect()
        ]


def rendered(families: Iterable[Family]) -> bytes:
    """Return what ``Metrics.families`` returned, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return generate_latest(registry)


class _Fixed(Collector):
    """Metrics that were collected elsewhere."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def describe(self) -> Iterator[Metric]:
        """Return nothing: there is nothing to check."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for name, text, kind, samples in self._families:
            family = Metric(name, text, kind)
            for sample, labels, value in samples:
                family.add_sample(sample, labels, value)
            yield family


class _EngineCollector(Collector):
    """The engine's counters, read at each scrape."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        block_size = BLOCK_SIZE if engine.kv_events is None else engine.kv_events.block_size
        self._cache_labels = {
            "model_name": model_name,
            "block_size": str(block_size),
            "num_gpu_blocks": str(engine.n_cells // block_size),
        }

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering the collector does not read the engine's counters."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics."""
        engine = self._engine
        stats = engine.stats()
        usage = stats.n_used_cells / engine.n_cells
        read_by_routers = (
            ("vllm:num_requests_waiting", "Requests that wait for a slot.", stats.n_queued),
            ("vllm:num_requests_running", "Requests that have a slot.", stats.n_active),
            ("vllm:kv_cache_usage_perc", "Fraction of the KV cells in use, 0 to 1.", usage),
        )
        for name, text, value in read_by_routers:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Tokens in a block, and blocks in all.", labels=list(self._cache_labels)
        )
        info.add_metric(list(self._cache_labels.values()), 1)
        yield info
        adapters = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters that are loaded: requests with any of them can run.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        names = [adapter.name for adapter in engine.adapters]
        adapters.add_metric([str(len(names)), ",".join(names), ""], 1)
        yield adapters
        gauges = (
            ("llamapipe_requests_waiting", "Requests that wait for a slot.", stats.n_queued),
            ("llamapipe_requests_running", "Requests that have a slot.", stats.n_active),
            ("llamapipe_kv_cells_used", "KV cells in use.", stats.n_used_cells),
            ("llamapipe_kv_cells", "KV cells in total.", engine.n_cells),
            ("llamapipe_cache_bytes", "Host memory of saved sequences.", stats.cache_bytes),
            ("llamapipe_compute_threads", "Compute threads in use.", stats.n_threads),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        counters = (
            ("llamapipe_steps", "Steps.", stats.steps),
            ("llamapipe_computed_prompt_tokens", "Prompt tokens computed.", stats.n_prompt_tokens),
            ("llamapipe_generated_tokens", "Tokens generated.", stats.n_completion_tokens),
            ("llamapipe_cached_prompt_tokens", "Prompt tokens that were cached.", stats.n_cache_hit_tokens),
            ("llamapipe_disk_reads", "Cached sequences that were read from disk.", stats.n_disk_reads),
            ("llamapipe_disk_writes", "Cached sequences that were written to disk.", stats.n_disk_writes),
            ("llamapipe_drafted_tokens", "Guessed tokens computed.", stats.n_drafted),
            ("llamapipe_accepted_tokens", "Guessed tokens that were right.", stats.n_accepted),
            (
                "llamapipe_model_drafted_tokens",
                "Of the computed ones, guesses of the draft model or the MTP layer.",
                stats.n_drafted_by_model,
            ),
            (
                "llamapipe_model_accepted_tokens",
                "Of the right ones, guesses of the draft model or the MTP layer.",
                stats.n_accepted_by_model,
            ),
            ("llamapipe_forced_tokens", "Of these, tokens that a constraint forced.", stats.n_forced),
            ("llamapipe_adapter_changes", "Changes of the adapters of steps.", stats.n_adapter_changes),
            ("llamapipe_encoded_media", "Images, sounds and tiles that were encoded.", stats.n_encoded_media),
            ("llamapipe_preemptions", "Requests that were preempted.", stats.n_preempted),
            ("llamapipe_compute_seconds", "Seconds spent computing steps.", stats.compute_s),
            ("llamapipe_idle_seconds", "Seconds without work.", stats.idle_s),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(name, text, value=value)
        yield _histogram(
            "llamapipe_step_seconds",
            "From the launch of a step until its tokens are sampled.",
            stats.step_times,
        )
        yield _histogram(
            "llamapipe_queue_seconds", "From a request's submission to its slot.", stats.queue_times
        )


def _histogram(name: str, text: str, times: TimeHistogram) -> HistogramMetricFamily:
    n = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, times.bounds_s), "+Inf"), times.counts, strict=True):
        n += count
        buckets.append((bound, n))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=times.total_s)
