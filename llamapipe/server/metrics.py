"""Prometheus metrics of a server: its requests, and the state of its engine at each scrape.

Routers (llm-d, the gateway API's inference extension, AIBrix) read the metrics whose names begin with ``vllm:``, by the
label ``model_name``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
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


# A sample's name, labels and value.
Sample = tuple[str, dict[str, str], float]


class Family(NamedTuple):
    """The samples of one metric, as values that JSON can express."""

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
        counter = partial(Counter, registry=self._registry)
        seconds = partial(Histogram, buckets=_SECONDS, registry=self._registry)
        self._requests = counter("llamapipe_requests", "Answered requests.", ["path", "status"])
        self._prompt = counter("llamapipe_prompt_tokens", "Prompt tokens of answers.")
        self._completion = counter("llamapipe_completion_tokens", "Generated tokens of answers.")
        self._ttft = seconds(
            "llamapipe_time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self._itl = seconds("llamapipe_inter_token_latency_seconds", "Between two tokens of a stream.")
        self._total = seconds(
            "llamapipe_request_seconds", "From a request's arrival to the end of its answer.", ["path"]
        )

    def count_answer(self, request: ClientRequest, seconds: float) -> None:
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
        """Return all metrics in Prometheus' text format. Waits until the engine's current step has finished."""
        return generate_latest(self._registry)

    def families(self) -> list[Family]:
        """Return all metrics as values that JSON can express."""
        return [
            Family(
                family.name,
                family.documentation,
                family.type,
                [(sample.name, dict(sample.labels), float(sample.value)) for sample in family.samples],
            )
            for family in self._registry.collect()
        ]


def render(families: Iterable[Family]) -> bytes:
    """Return metrics from ``Metrics.families`` in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return generate_latest(registry)


class _Undescribed(Collector):
    """A collector whose metrics are not collected when it is registered."""

    def describe(self) -> Iterator[Metric]:
        return iter(())


class _Fixed(_Undescribed):
    """Metrics that were collected elsewhere."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, text, kind, samples in self._families:
            family = Metric(name, text, kind)
            for sample, labels, value in samples:
                family.add_sample(sample, labels, value)
            yield family


class _EngineCollector(_Undescribed):
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

    def collect(self) -> Iterator[Metric]:
        engine, model = self._engine, {"model_name": self._model_name}
        stats = engine.stats()
        usage = stats.n_used_cells / engine.n_cells
        yield _gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", model, stats.n_queued)
        yield _gauge("vllm:num_requests_running", "Requests that have a slot.", model, stats.n_active)
        yield _gauge("vllm:kv_cache_usage_perc", "Fraction of the KV cells in use, 0 to 1.", model, usage)
        about_cells = "Tokens in a block, and blocks in all."
        yield _gauge("vllm:cache_config_info", about_cells, self._cache_labels, 1)
        names = [adapter.name for adapter in engine.adapters]
        about_adapters = "Adapters that are loaded: requests with any of them can run."
        loras = {
            "max_lora": str(len(names)),
            "running_lora_adapters": ",".join(names),
            "waiting_lora_adapters": "",
        }
        yield _gauge("vllm:lora_requests_info", about_adapters, loras, 1)
        gauges: tuple[tuple[str, str, float], ...] = (
            ("llamapipe_requests_waiting", "Requests that wait for a slot.", stats.n_queued),
            ("llamapipe_requests_running", "Requests that have a slot.", stats.n_active),
            ("llamapipe_kv_cells_used", "KV cells in use.", stats.n_used_cells),
            ("llamapipe_kv_cells", "KV cells in total.", engine.n_cells),
            ("llamapipe_cache_bytes", "Host memory of saved sequences.", stats.cache_bytes),
            ("llamapipe_compute_threads", "Compute threads in use.", stats.n_threads),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        of_model = "guesses of the draft model or the MTP layer"
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
                f"Of the computed ones, {of_model}.",
                stats.n_drafted_by_model,
            ),
            ("llamapipe_model_accepted_tokens", f"Of the right ones, {of_model}.", stats.n_accepted_by_model),
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


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=list(labels))
    gauge.add_metric(list(labels.values()), value)
    return gauge


def _histogram(name: str, text: str, times: TimeHistogram) -> HistogramMetricFamily:
    n = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, times.bounds_s), "+Inf"), times.counts, strict=True):
        n += count
        buckets.append((bound, n))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=times.total_s)
