"""`fedge label`: a small page on this machine, on which the owner labels inputs by keyboard. Needs aiohttp.

It listens on 127.0.0.1 alone. Another website in the same browser can neither read from it, by whatever name it asks,
nor act: each action has a header that only a page of the same origin can send.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import click
import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from edge_agent.samples.cli import encode_picture, open_store
from edge_agent.samples.store import SampleStore
from fedge.errors import ConfigError, raise_as
from fedge.system.background import run_until_stopped
from fedge.system.help import Command, json_option, option
from fedge.system.stopping import INTERRUPTED
from fedge.system.text import Heading

HOST: Final = "127.0.0.1"
NAMES: Final = frozenset({HOST, "localhost"})
HEADER: Final = "X-Fedge-Label"
MAX_BODY_BYTES: Final = 1000
PAGE: Final = Path(__file__).parent / "label.html"
SECURE: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Decision(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the owner does with a sample: give it a class, mark it as sensitive, or delete it."""

    number: Annotated[int, Meta(ge=1)]
    action: Literal["label", "mark", "delete"]
    label: Annotated[int, Meta(ge=0)] = 0


@click.command(cls=Command)
@click.argument("home", type=click.Path(path_type=Path))
@option("--port", heading=Heading.SERVER, type=click.IntRange(0, 65535), default=8090, show_default=True,
        help="The page is at this port of 127.0.0.1; 0 is a free one.")  # fmt: skip
@json_option("The command prints the page's address as JSON.")
def label(home: Path, port: int, *, as_json: bool) -> int:
    """Label a device's inputs on a page of this machine, by keyboard, until Ctrl-C or SIGTERM.

    This is for tasks with classes. Inputs without a label are kept only if samples.toml of HOME has `unlabelled`. The
    keys 1 to 9 and the letters choose the class, the arrow keys go back and forth; space marks a sample as sensitive,
    Delete deletes it.

    Examples:
      fedge label cam1
      ssh -L 8090:127.0.0.1:8090 pi@cam1 fedge label cam1

    Exit codes: 2 no such HOME, 3 the port is taken, 4 the store cannot be read or written, 130 stopped.
    """

    def announce(url: str) -> None:
        click.echo(json.dumps({"url": url}) if as_json else f"label at {url}")

    with open_store(home) as store:
        task = store.require_task()
        if not task.classes:
            raise ConfigError(
                f"`fedge label` gives samples one of several classes, and task {task.name} has none: its problem is "
                f"{task.problem.NAME}; send targets to `fedge serve` as feedback, or add an .npz with x and y by "
                "`fedge samples add`"
            )
        asyncio.run(_serve(store, port, announce))
    return INTERRUPTED


async def _serve(store: SampleStore, port: int, announce: Callable[[str], None]) -> None:
    runner = web.AppRunner(make_application(store), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        with raise_as(ConfigError, f"port {port} cannot be used"):
            await site.start()
        announce(f"http://{HOST}:{runner.addresses[0][1]}/")
        await run_until_stopped(asyncio.Event().wait())
    finally:
        await runner.cleanup()


def make_application(store: SampleStore) -> web.Application:
    """Make the page of a store."""
    page = LabelPage(store)
    made = web.Application(middlewares=[refuse_others], client_max_size=MAX_BODY_BYTES)
    made.add_routes(
        [
            web.get("/", page.show),
            web.get("/samples", page.list_numbers),
            web.get(r"/picture/{number:\d{1,15}}", page.show_picture),
            web.get(r"/numbers/{number:\d{1,15}}", page.show_numbers),
            web.post("/decide", page.decide),
        ]
    )
    return made


@web.middleware
async def refuse_others(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse who asks for another name than this machine's own, and who acts without our page."""
    if request.url.host not in NAMES:
        raise web.HTTPForbidden(text="ask for 127.0.0.1")
    if request.method != "GET" and request.headers.get(HEADER) != "1":
        raise web.HTTPForbidden(text="only the page itself may act")
    try:
        answer = await handler(request)
    except (ConfigError, msgspec.DecodeError) as error:
        answer = web.json_response({"error": str(error)}, status=400)
    answer.headers.update(SECURE)
    return answer


class LabelPage:
    """The answers of the page."""

    def __init__(self, store: SampleStore) -> None:
        self._store = store

    async def show(self, _: web.Request) -> web.Response:
        """Answer with the page."""
        return web.Response(body=PAGE.read_bytes(), content_type="text/html", charset="utf-8")

    async def list_numbers(self, _: web.Request) -> web.Response:
        """Answer with the classes, and the samples without a label, newest first."""
        task = self._store.refresh_task()
        found = self._store.list_samples(labelled=False, limit=1000)
        pictures = task.preprocessing.image_mode is not None
        return _answer({"classes": task.classes, "pictures": pictures, "samples": found})

    async def show_picture(self, request: web.Request) -> web.Response:
        """Answer with a sample as a picture."""
        x = self._store.read_input(int(request.match_info["number"]))
        return web.Response(body=encode_picture(self._store.require_task(), x), content_type="image/png")

    async def show_numbers(self, request: web.Request) -> web.Response:
        """Answer with a sample's numbers."""
        x = self._store.read_input(int(request.match_info["number"]))
        return _answer({"shape": x.shape, "numbers": x.reshape(-1)[:2000].tolist()})

    async def decide(self, request: web.Request) -> web.Response:
        """Carry out what the owner decides on a sample."""
        decision = msgspec.json.decode(await request.read(), type=Decision)
        match decision.action:
            case "label":
                self._store.set_label(decision.number, decision.label)
            case "mark":
                self._store.mark([decision.number])
            case "delete":
                self._store.delete([decision.number])
        return _answer({})


def _answer(content: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")
