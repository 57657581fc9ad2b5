"""Parts of a page as HTML."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Final

from fedge.data.problems.scores import ACCURACY, Figure, get_figure

NARROW: Final = 4
"""Most columns that fit on a phone."""


def render_page(title: str, lead: str, *content: str) -> str:
    """Render a whole page; `content` is HTML, the rest text."""
    template = Template(_read_resource("page.html"))
    return template.substitute(
        style=_read_resource("page.css"), title=escape(title), lead=escape(lead), content="\n".join(content)
    )


def render_section(title: str, text: str, content: str) -> str:
    """Render a part of a page; `content` is HTML."""
    said = f"<p>{escape(text)}</p>\n" if text else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{said}{content}\n</section>"


def render_columns(*sections: str) -> str:
    """Render sections side by side if there is room."""
    return '<div class="columns">\n' + "\n".join(sections) + "\n</div>"


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table of texts. A table that is too wide scrolls by itself, and says so on a phone."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    whole = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll{" wide" * (len(head) > NARROW)}" tabindex="0">{whole}</div>'


def render_rows(rows: Sequence[Mapping[str, Any]], figure: Figure = ACCURACY, further: Collection[str] = ()) -> str:
    """Render rows of a CSV file as a table.

    `further`: columns of figures that have their own formats; a number in another column is a `figure`.
    """
    words = {True: "yes", False: "no", None: "–"}

    def format_cell(name: str, cell: object) -> str:
        if isinstance(cell, float):
            return (get_figure(name) if name in further else figure).format_cell(cell)
        return words[cell] if cell is None or isinstance(cell, bool) else str(cell)

    def format_heading(name: str) -> str:
        return get_figure(name).words if name in further else name.removeprefix("n_").replace("_", " ")

    head = [figure.words if name == figure.name else format_heading(name) for name in rows[0]]
    return render_table(head, ([format_cell(*each) for each in row.items()] for row in rows))


def render_tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Render figures in large letters, with captions."""
    found = (f"<div><strong>{escape(big)}</strong><span>{escape(small)}</span></div>" for big, small in figures)
    return '<div class="tiles">\n' + "\n".join(found) + "\n</div>"


def _read_resource(name: str) -> str:
    return files("coordinator.simulation.reports").joinpath(name).read_text(encoding="utf-8")
