"""Bodies of requests: bounded one by one and together."""

import asyncio

import pytest

from draftsmith.scripts.services.http_server import BodyError, BodyReader


class Sent:
    """A request whose body comes in parts, each once it may."""

    def __init__(self, *parts: bytes, go: asyncio.Event | None = None):
        self.parts, self.go = parts, go

    async def stream(self):
        for part in self.parts:
            yield part
            if self.go is not None:
                await self.go.wait()


def test_a_body_that_is_too_large_is_refused():
    with pytest.raises(BodyError, match="body: expected at most 5 bytes, found more") as error:
        asyncio.run(BodyReader(5, 100).read(Sent(b"abc", b"def")))
    assert error.value.status == 413


def test_bodies_that_come_together_are_bounded_and_the_room_is_given_back():
    async def read() -> None:
        reader, go = BodyReader(8, 10), asyncio.Event()
        slow = asyncio.create_task(reader.read(Sent(b"abcdef", go=go)))
        await asyncio.sleep(0)
        with pytest.raises(BodyError, match="found too many others; try again") as error:
            await reader.read(Sent(b"abc", b"def"))
        assert error.value.status == 503
        go.set()
        assert await slow == b"abcdef"
        assert await reader.read(Sent(b"abcd", b"efgh")) == b"abcdefgh"

    asyncio.run(read())
