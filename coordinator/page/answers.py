"""Common parts of the page's answers."""

from __future__ import annotations

from typing import Final

from aiohttp import web

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
WORTH_COMPRESSING: Final = 1000
"""Size in bytes from which on an answer is compressed."""
COMPRESSED_APART: Final = 1 << 15
"""Size in bytes from which on a thread compresses it."""


def answer_json(body: bytes) -> web.Response:
    """Answer with this JSON, compressed if the browser takes that."""
    answer = web.Response(
        body=body, content_type="application/json", charset="utf-8", zlib_executor_size=COMPRESSED_APART
    )
    if len(body) > WORTH_COMPRESSING:
        answer.enable_compression()
    return answer


def read_number(request: web.Request, name: str, default: int, most: int) -> int:
    """Read a number in the query.

    Raises:
        web.HTTPBadRequest: the text is no number.
    """
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 20:
        raise web.HTTPBadRequest(text=f"{name} is a number")
    return min(int(text), most)
