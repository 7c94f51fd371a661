"""A web service that streams text to many clients: a client that hangs up cancels its request, one too many gets 429.

Start it with `uvicorn fastapi_stream:app`; run as a program, it asks itself.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

import llamapipe as lp


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One engine for the whole process."""
    async with lp.Engine(lp.demo_model_path(), max_queue=100) as engine:
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/stream")
async def streamed(prompt: str, max_tokens: int = 40) -> StreamingResponse:
    """The completion of a prompt, as it is generated."""
    params = lp.SamplingParams(max_tokens=max_tokens, temperature=0)
    try:
        stream = app.state.engine.astream(prompt, params, block=False)  # in the queue, or refused
    except lp.errors.QueueFullError as error:
        raise HTTPException(429, str(error), headers={"Retry-After": "1"}) from None
    except lp.errors.InvalidRequestError as error:
        raise HTTPException(400, str(error)) from None

    async def text() -> AsyncIterator[str]:
        async with stream as deltas:
            async for delta in deltas:
                yield delta.text

    return StreamingResponse(text(), media_type="text/plain")


async def try_it() -> None:
    """Asks the service without a network."""
    transport = httpx.ASGITransport(app=app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        answer = await client.get("/stream", params={"prompt": "1, 2, 3,", "max_tokens": 12})
        print(answer.text)
        assert (await client.get("/stream", params={"prompt": "1, " * 5000})).status_code == 400


if __name__ == "__main__":
    asyncio.run(try_it())
