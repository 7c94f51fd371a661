"""OpenTelemetry: a span for each request, a child of the caller's span. Needs llamapipe[otel] and opentelemetry-sdk."""

import asyncio

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import llamapipe as lp

exporter = InMemorySpanExporter()  # in a service, use an OTLPSpanExporter in a BatchSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("example")


async def handle(engine: lp.Engine, n: int) -> None:
    """Handles one of the service's requests, which calls the model twice."""
    params = lp.SamplingParams(max_tokens=8, temperature=0)
    with tracer.start_as_current_span(f"request {n}"):
        out = await engine.agenerate(f"{n}, {n + 1},", params)
        async for _ in engine.astream(out.text, params):
            pass


async def main() -> None:
    """Four requests at once."""
    async with lp.Engine(lp.demo_model_path()) as engine:
        lp.telemetry.instrument(engine)
        await asyncio.gather(*(handle(engine, n) for n in range(4)))


asyncio.run(main())
spans = exporter.get_finished_spans()
names = {span.context.span_id: span.name for span in spans if span.context}
for span in spans:
    if span.parent and span.attributes:
        usage = [span.attributes[f"gen_ai.usage.{kind}_tokens"] for kind in ("input", "output")]
        events = [event.name.removeprefix("llamapipe.") for event in span.events]
        print(
            f"{names[span.parent.span_id]} > {span.name}: {usage[0]} + {usage[1]} tokens, {', '.join(events)}"
        )
