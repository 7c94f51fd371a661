"""instructor: pydantic objects through OpenAI's client and llamapipe's server, in one process, without a socket."""

import asyncio
from typing import Literal

import httpx2
import instructor
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict

import llamapipe as lp
from llamapipe.server import app


class Sighting(BaseModel):
    """What a text tells. Extra fields are forbidden, or a small model would add some without end."""

    model_config = ConfigDict(extra="forbid")
    animal: Literal["cow", "cat", "dog", "fox"]
    is_hungry: bool


async def main() -> None:
    """Extracts an object from each text, all concurrently."""
    texts = [f"The {animal} was {mood}." for animal in ("cow", "cat", "fox") for mood in ("hungry", "happy")]
    async with lp.Engine(lp.demo_model_path()) as engine:
        transport = httpx2.ASGITransport(app=app(engine))
        async with httpx2.AsyncClient(transport=transport) as http_client:
            openai = AsyncOpenAI(base_url="http://in-process/v1", api_key="none", http_client=http_client)
            # The server enforces the schema for every token, so instructor never needs to retry.
            client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
            tasks = [
                client.chat.completions.create(
                    model="demo",
                    response_model=Sighting,
                    messages=[{"role": "user", "content": text}],
                    temperature=0,
                    max_retries=0,
                )
                for text in texts
            ]
            for text, sighting in zip(texts, await asyncio.gather(*tasks), strict=True):
                print(text, repr(sighting))


asyncio.run(main())
