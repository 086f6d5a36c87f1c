from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_odc.data.stdlib import StdlibSource, definitions, halves
from primus_odc.errors import DataError

SOURCE = '''"""Doc."""
import x

@one
@two(
    3)
class A:
    def inner(self): ...

async def f():
    pass
def g(): pass
VALUE = 1
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    files = {
        "b.py": SOURCE,
        "a/z.py": "# -*- coding: latin-1 -*-\nx = '\xe9'\n",
        "a/__init__.py": "\n",
        "a/test/t.py": "left = 1",
        "test/t.py": "left = 1",
        "site-packages/p.py": "left = 1",
        "encodings/e.py": "left = 1",
        "_sysconfigdata__linux.py": "left = 1",
        "config-3.11/c.py": "left = 1",
        "a/readme.txt": "left",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode("latin-1"))
    return root


def test_definitions_by_hand() -> None:
    pieces = definitions(SOURCE)
    assert [piece.splitlines()[0] for piece in pieces] == ['"""Doc."""', "@one", "async def f():", "def g(): pass"]
    assert "".join(pieces) == SOURCE


def test_files_in_order_with_the_left_out(library: Path) -> None:
    records = list(StdlibSource("file", root=library))
    assert [r.sample_id for r in records] == ["a/z.py", "b.py"]
    assert records[0].turns[0].text == "# -*- coding: latin-1 -*-\nx = 'é'\n"
    assert [r.sample_id for r in StdlibSource("definition", root=library)] == ["a/z.py#0", "b.py#0", "b.py#1", "b.py#2", "b.py#3"]
    assert len(StdlibSource("definition", root=library)) == 5


def test_as_prompt_and_reply(library: Path) -> None:
    (record,) = (r for r in StdlibSource("file", "conversation", library) if r.sample_id == "b.py")
    assert [turn.role for turn in record.turns] == ["user", "assistant"]
    assert record.turns[0].text == "".join(SOURCE.splitlines(keepends=True)[:6])
    assert record.turns[0].text + record.turns[1].text == SOURCE


def test_the_place_of_the_installation_does_not_matter(library: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(library, tmp_path / "another" / "python3"))
    one, other = StdlibSource("definition", root=library), StdlibSource("definition", root=elsewhere)
    assert one.fingerprint == other.fingerprint and list(one) == list(other)
    assert StdlibSource("file", root=library).fingerprint != one.fingerprint
    (elsewhere / "b.py").write_text(SOURCE + "\n#")
    assert StdlibSource("definition", root=elsewhere).fingerprint != one.fingerprint


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="choose another sft_dataset_name"):
        StdlibSource(root=tmp_path)


def test_this_python_has_a_long_tail() -> None:
    lengths = sorted(len(record.turns[0].text) for record in StdlibSource("definition"))
    assert len(lengths) > 1000
    assert lengths[len(lengths) * 99 // 100] > 10 * lengths[len(lengths) // 2]


@settings(max_examples=100)
@given(
    st.text(alphabet="ab \n@", max_size=40)
    | st.lists(st.sampled_from(["@d", "def f():", " x", "", "class C:", "y"]), max_size=9).map("\n".join)
)
def test_cutting_loses_nothing(text: str) -> None:
    first, rest = halves(text)
    assert first + rest == text
    assert len(first.splitlines()) <= max(1, len(rest.splitlines()))
    assert "".join("".join(definitions(text)).split()) == "".join(text.split())
