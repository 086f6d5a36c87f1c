"""Pictures without a drawing library: rectangles and short capital texts on a numpy canvas, written as PNG."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

Colour = tuple[int, int, int]
GLYPH_WIDTH, GLYPH_HEIGHT = 3, 5

# Rows of three bits, top to bottom, as one octal number a glyph.
_GLYPHS = {
    "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71717, "4": 0o55711, "5": 0o74717, "6": 0o74757, "7": 0o71111, "8": 0o75757,
    "9": 0o75717, "A": 0o25755, "B": 0o65656, "C": 0o34443, "D": 0o65556, "E": 0o74647, "F": 0o74644, "G": 0o34553, "H": 0o55755,
    "I": 0o72227, "J": 0o11152, "K": 0o55655, "L": 0o44447, "M": 0o57755, "N": 0o65555, "O": 0o25552, "P": 0o65644, "Q": 0o25563,
    "R": 0o65655, "S": 0o34216, "T": 0o72222, "U": 0o55557, "V": 0o55552, "W": 0o55775, "X": 0o55255, "Y": 0o55222, "Z": 0o71247,
    ".": 0o00002, ",": 0o00024, ":": 0o02020, "_": 0o00007, "-": 0o00700, "+": 0o02720, "/": 0o11244, "(": 0o24442, ")": 0o21112,
    " ": 0o00000,
}  # fmt: skip


class Canvas:
    """``pixels``: uint8 [height, width, 3], row 0 on top."""

    def __init__(self, width: int, height: int, ground: Colour) -> None:
        self.pixels = np.full((height, width, 3), ground, dtype=np.uint8)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: Colour, hatch: Colour | None = None) -> None:
        """Filled, at least one pixel wide; ``hatch`` draws diagonal lines of that colour into it. What lies outside is cut off."""
        left, top = max(0, round(x)), max(0, round(y))
        right, bottom = max(left + 1, round(x + width)), max(top + 1, round(y + height))
        area = self.pixels[top:bottom, left:right]
        area[:] = colour
        if hatch is not None:
            rows, columns = np.indices(area.shape[:2])
            area[(rows + top + columns + left) % 6 < 2] = hatch

    def text(self, x: int, y: int, words: str, colour: Colour, scale: int = 2) -> None:
        """In capitals; a character that has no glyph is a gap."""
        for number, character in enumerate(words.upper()):
            bits = _GLYPHS.get(character, 0)
            for row in range(GLYPH_HEIGHT):
                for column in range(GLYPH_WIDTH):
                    if bits >> (3 * (GLYPH_HEIGHT - 1 - row) + 2 - column) & 1:
                        left = x + scale * (number * (GLYPH_WIDTH + 1) + column)
                        self.rectangle(left, y + scale * row, scale, scale, colour)

    def write(self, file: Path) -> None:
        """As an 8-bit RGB PNG."""
        height, width, _ = self.pixels.shape
        rows = np.concatenate([np.zeros((height, 1), dtype=np.uint8), self.pixels.reshape(height, -1)], axis=1)  # no filter
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        file.parent.mkdir(parents=True, exist_ok=True)
        chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + _chunk(b"IEND", b"")
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def text_width(words: str, scale: int = 2) -> int:
    """Pixels that :meth:`Canvas.text` takes."""
    return scale * (GLYPH_WIDTH + 1) * len(words)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
