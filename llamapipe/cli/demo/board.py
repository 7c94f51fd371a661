"""Several texts that grow at once: side by side on a terminal, labelled lines elsewhere."""

from __future__ import annotations

import textwrap
from types import TracebackType

from llamapipe.cli.terminal import Terminal

_GAP = 3
_NARROWEST = 22  # characters; below that columns are no longer readable


class Board:
    """Shows one column for each title and redraws it as text comes in.

    On a terminal wide enough the columns stand side by side and each keeps its last `n_lines` lines; elsewhere
    every finished sentence becomes a line that begins with its title, so that the interleaving can be seen in
    a log as well.

    A context manager: entering hides the cursor, leaving draws the last state and shows the cursor again.
    Belongs to one thread.
    """

    def __init__(self, terminal: Terminal, titles: list[str], n_lines: int = 7) -> None:
        self._terminal = terminal
        self._titles = titles
        self._texts = ["" for _ in titles]
        self._notes = ["" for _ in titles]
        self._note_styles: list[tuple[str, ...]] = [("dim",) for _ in titles]
        self._printed = [0 for _ in titles]  # characters already written as labelled lines
        self._width = (terminal.columns - 1 - _GAP * (len(titles) - 1)) // len(titles)
        self._n_lines = max(2, min(n_lines, terminal.lines - 5))
        self._side_by_side = terminal.redraws and self._width >= _NARROWEST
        self._drawn = False

    def __enter__(self) -> Board:
        if self._side_by_side:
            self._terminal.write("\x1b[?25l")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BrokenPipeError):
            return
        self.draw()
        if self._side_by_side:
            self._terminal.write("\x1b[?25h")
            return
        for column in range(len(self._titles)):
            self._print_to(column, len(self._texts[column]))

    def text(self, column: int) -> str:
        """The whole text of a column."""
        return self._texts[column]

    def add(self, column: int, text: str) -> None:
        """Append to a column; shown by the next `draw`."""
        self._texts[column] += text
        if not self._side_by_side:
            so_far = self._texts[column]
            self._print_to(column, max(so_far.rfind(end) + 1 for end in (". ", "! ", "? ", "\n")))

    def note(self, column: int, text: str, *styles: str) -> None:
        """Set the line under a column."""
        self._notes[column] = text
        self._note_styles[column] = styles or ("dim",)

    def end(self, column: int, text: str, *styles: str) -> None:
        """Set the line under a column whose text is complete."""
        self.note(column, text, *styles)
        if not self._side_by_side:
            self._print_to(column, len(self._texts[column]))
            self._label(column, text)

    def draw(self) -> None:
        """Redraw the columns in place; does nothing if the output cannot be redrawn."""
        if not self._side_by_side:
            return
        terminal, width = self._terminal, self._width
        rows = [
            [terminal.style(title[:width].ljust(width), "bold", "cyan") for title in self._titles],
            [terminal.style(terminal.symbol("─") * width, "dim") for _ in self._titles],
        ]
        bodies = [self._wrap(text) for text in self._texts]
        rows += [[body[i].ljust(width) for body in bodies] for i in range(self._n_lines)]
        rows.append(
            [
                terminal.style(note[:width].ljust(width), *styles)
                for note, styles in zip(self._notes, self._note_styles, strict=True)
            ]
        )
        up = f"\x1b[{len(rows)}A" if self._drawn else ""
        # One write for the whole picture, or it flickers.
        terminal.write(up + "".join("\r\x1b[2K" + (" " * _GAP).join(row) + "\n" for row in rows))
        self._drawn = True

    def _wrap(self, text: str) -> list[str]:
        """The last `n_lines` lines of `text` broken at the column's width, padded with empty ones."""
        text = self._terminal.text(text).expandtabs(4)
        lines = [line for part in text.split("\n") for line in textwrap.wrap(part, self._width) or [""]]
        return (
            (lines + [""] * self._n_lines)[: self._n_lines]
            if len(lines) <= self._n_lines
            else lines[-self._n_lines :]
        )

    def _print_to(self, column: int, end: int) -> None:
        """Write the column's text up to `end` as labelled lines."""
        start = self._printed[column]
        if end <= start:
            return
        self._printed[column] = end
        for line in self._texts[column][start:end].splitlines():
            if line.strip():
                self._label(column, line.strip())

    def _label(self, column: int, text: str) -> None:
        label = self._titles[column].ljust(max(len(title) for title in self._titles))
        self._terminal.line(f"  {label} {self._terminal.symbol('│')} {self._terminal.text(text)}")
