"""One table, as aligned text and as HTML.

What the package tells in rows (`callback.captured`, `callback.history`, ...) is written once, here:
the text form says all that the HTML form says, and neither needs colour.
"""

from dataclasses import dataclass
from html import escape
from typing import List, Sequence, Tuple

__all__ = ["Table"]


@dataclass(frozen=True)
class Table:
    """A heading, column names and rows of text.

    Args:
        title: One line above the table.
        columns: The column names; one that starts with `>` is aligned to the right.
        rows: One text a column.
        note: Lines below the table, if any.

    Example:
        >>> print(Table("two keys", ("key", ">bytes"), [("train_loss", "4 B"), ("n", "128 B")]))
        two keys
            key         bytes
            train_loss    4 B
            n           128 B
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        names, right = self._columns()
        lines = [names, *self.rows]
        widths = [max(len(line[n]) for line in lines) for n in range(len(names))]
        texts = [
            "  ".join(
                cell.rjust(width) if at_right else cell.ljust(width)
                for cell, width, at_right in zip(line, widths, right)
            )
            for line in lines
        ]
        note = self.note.splitlines()
        return "\n".join(
            [
                self.title,
                *(f"    {text}".rstrip() for text in [*(texts if self.rows else []), *note]),
            ]
        )

    def _repr_html_(self) -> str:
        names, right = self._columns()
        styles = [f' style="text-align: {"right" if at_right else "left"}"' for at_right in right]

        def line(tag: str, cells: Sequence[str]) -> str:
            return "".join(
                f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in zip(cells, styles)
            )

        parts: List[str] = [f"<p><b>{escape(self.title)}</b></p>"]
        if self.rows:
            body = "".join(f"<tr>{line('td', row)}</tr>" for row in self.rows)
            parts.append(
                f"<table><thead><tr>{line('th', names)}</tr></thead><tbody>{body}</tbody></table>"
            )
        if self.note:
            parts.append(f"<p>{'<br>'.join(map(escape, self.note.splitlines()))}</p>")
        return "".join(parts)

    def _columns(self) -> Tuple[List[str], List[bool]]:
        return (
            [name.lstrip(">") for name in self.columns],
            [name.startswith(">") for name in self.columns],
        )
