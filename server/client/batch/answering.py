"""Lines in, lines out: what `quill batch` and pipelines of others' have in common.

Knows: lines, servers. Does not know: files, order, terminals.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quill.server.client.access import Access
from quill.server.client.batch.answer import Answer, write_answer, write_error, write_reply
from quill.server.client.batch.in_order import in_order
from quill.server.client.batch.line import Json, derived_seed, read_object, read_request
from quill.server.client.batch.posting import read_posted
from quill.server.client.batch.servers import CONCURRENCY, Asking, Servers
from quill.server.client.errors import CallError
from quill.server.errors import InvalidFieldError

_NAMES = ("id", "custom_id")  # that authors give their lines
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True)
class Line:
    """`seed`: if it has none. `head`: what its answer begins with."""

    text: bytes
    seed: int
    head: Json

    def written_head(self) -> bytes:
        return json.dumps(self.head).encode().removesuffix(b"}")


def numbered(text: bytes, number: int, seed: int, model: str) -> Line:
    """A line of a file. The digest is of everything that its answer depends upon."""
    own = derived_seed(seed, number)
    return Line(text, own, {"line": number, "digest": digest(text, str(seed), model)})


def digest(text: bytes, *rest: str) -> str:
    whole = b"\0".join([text.strip(), *(each.encode() for each in rest)])
    return hashlib.sha256(whole).hexdigest()[:_DIGEST_CHARACTERS]


async def answer(line: Line, servers: Servers) -> Answer:
    """A line that can't be answered is answered with the reason."""
    tail: Json = {}
    try:
        found = read_object(line.text)
        tail = {name: found[name] for name in _NAMES if found.get(name) is not None}
        if "url" in found:
            posted = read_posted(found, line.seed)
            reply = await servers.post(posted)
            return write_reply(line.head, reply, digest(line.text, str(line.seed)), tail)
        response = await servers.ask(read_request(found, line.seed))
        return write_answer(line.head, response, tail)
    except (InvalidFieldError, CallError) as error:
        return write_error(line.head, error, tail)


def answer_lines(
    lines: Sequence[str],
    addresses: str | Sequence[str],
    *,
    http_addresses: Sequence[str] = (),
    access: Access | None = None,
    concurrency: int = CONCURRENCY,
    seed: int = 0,
) -> list[str]:
    """The answers to some lines of a batch, for pipelines that cut files themselves.

    A line that has no seed gets one by its text: where equal lines should be answered differently,
    give them seeds.
    """
    way = Asking(
        addresses=[addresses] if isinstance(addresses, str) else addresses,
        http_addresses=http_addresses,
        access=access or Access(),
        concurrency=concurrency,
    )
    asked = [
        Line(each.encode("utf-8", "surrogatepass"), derived_seed(seed, each), {}) for each in lines
    ]
    return asyncio.run(_answer_all(asked, way))


async def _answer_all(lines: Iterable[Line], asking: Asking) -> list[str]:
    answers: list[str] = []

    def take(each: Answer) -> None:
        answers.append(each.line.decode().removesuffix("\n"))

    async with Servers(asking) as servers:
        await in_order(lines, lambda line: answer(line, servers), take, asking.concurrency)
    return answers
