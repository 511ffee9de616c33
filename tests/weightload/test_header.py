"""One header: what the reference opens is opened, and what could mislead is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from weightload.checkpoint.header import (
    DTYPE_BITS,
    Header,
    decode_strict_json,
    parse_strict_json,
    read_header,
)
from weightload.errors import HeaderError

if TYPE_CHECKING:
    from pathlib import Path


def parse(content: bytes) -> Header:
    """Parse a whole file held in memory."""
    return read_header(lambda count, offset: content[offset : offset + count], len(content), "s")


def file_of(header: object, data: bytes = b"", pad: int = 0) -> bytes:
    """The bytes of a file with this header, given as JSON text or as an object."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """One tensor's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("pad", range(4))
def test_any_header_length_is_accepted(pad: int) -> None:
    """The data section may start at any byte."""
    header = parse(file_of({"a": entry("F32", [2], 0, 8)}, bytes(8), pad))
    (record,) = header.records
    assert record.start == header.data_start
    assert record.nbytes == 8


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        *[(dtype, [8], bits) for dtype, bits in DTYPE_BITS.items()],
        ("F4", [4], 2),
        ("F6_E2M3", [4], 3),
        ("F6_E3M2", [8], 6),
        ("F32", [], 4),
        ("F32", [2, 0, 3], 0),
        ("C64", [1], 8),
        ("BOOL", [3], 3),
    ],
)
def test_every_dtype_has_its_size(dtype: str, shape: list[int], nbytes: int) -> None:
    """Sizes are counted in bits; scalars have one element and empty tensors none."""
    header = parse(file_of({"a": entry(dtype, shape, 0, nbytes)}, bytes(nbytes)))
    assert [record.nbytes for record in header.records] == [nbytes]


def test_empty_tensors_may_lie_anywhere() -> None:
    """At the start, at the end, several at one offset."""
    entries = {
        "z": entry("F32", [2, 0, 3], 4, 4),
        "b": entry("F32", [1], 0, 4),
        "a": entry("BF16", [0], 0, 0),
    }
    header = parse(file_of(entries, bytes(4)))
    assert [record.name for record in header.records] == ["a", "b", "z"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "limit"),
        ((10**8 + 1).to_bytes(8, "little") + b"{}", "limit"),
        ((10**6).to_bytes(8, "little") + bytes(58), "cut off inside its header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git-LFS"),
        (file_of(b"[]"), "not a JSON object"),
        (file_of(b"{} {}"), "not valid JSON"),
        (file_of(b'{"a": NaN}'), "not valid JSON"),
        (file_of(b"\xff\xfe{}"), "not valid JSON"),
        (file_of({"a": 1}), "no entry"),
        (file_of({"a": entry("F128", [1], 0, 16)}, bytes(16)), "dtype"),
        (file_of({"a": entry("F4", [3], 0, 2)}, bytes(2)), "does not fit"),
        (file_of({"a": entry("F32", [3], 0, 8)}, bytes(8)), "does not fit"),
        (file_of({"a": entry("F32", [1], 4, 0)}, bytes(4)), "does not fit"),
        (file_of({"a": entry("F32", [2**62, 4], 0, 0)}), "does not fit"),
        (file_of({"a": entry("F32", [True], 0, 4)}, bytes(4)), "list of sizes"),
        (file_of({"a": entry("F32", [-1], 0, 4)}, bytes(4)), "list of sizes"),
        (file_of({"a": {**entry("U8", [1], 0, 1), "data_offsets": [0]}}, b"x"), "two byte"),
        (file_of({"a": entry("F32", [2], 0, 8)}, bytes(9)), "after its last tensor"),
        (file_of({"a": entry("F32", [2], 0, 8)}, bytes(7)), "truncated"),
        (file_of({"a": entry("F32", [1], 8, 12)}, bytes(12)), "leave a gap"),
        (
            file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, bytes(8)),
            "overlap",
        ),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
        (
            file_of(
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
                bytes(4),
            ),
            "'a' occurs twice",
        ),
        (
            file_of(
                b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', b"abcd"
            ),
            "'dtype' occurs twice",
        ),
    ],
)
def test_malformed_files_are_refused_in_words(content: bytes, says: str) -> None:
    """Each lie has its own sentence."""
    with pytest.raises(HeaderError, match=says):
        parse(content)


NAMES = st.text(min_size=1, max_size=6) | st.sampled_from(["__metadata__x", "a/b", "ü", '"', "\\"])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), max_size=3)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Mostly well-formed files, each sometimes with one thing wrong."""
    position = 0
    entries: dict[str, Any] = {}
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        shape = draw(SHAPES)
        dtype = draw(st.sampled_from([*DTYPE_BITS, "F128"]))
        bits = DTYPE_BITS.get(dtype, 8)
        for size in shape:
            bits *= size
        end = position + bits // 8 + draw(st.sampled_from([0] * 12 + [1, -1]))
        entries[name] = entry(dtype, shape, position + draw(st.sampled_from([0] * 20 + [1])), end)
        position = max(end, 0)
    if draw(st.booleans()):
        entries["__metadata__"] = draw(
            st.sampled_from([{}, {"format": "pt"}, {"n": 1}, None, [], "x"])
        )
    keys = draw(st.permutations(sorted(entries)))
    data = bytes(max(0, position + draw(st.sampled_from([0] * 12 + [1, -1]))))
    return file_of({key: entries[key] for key in keys}, data, draw(st.integers(0, 9)))


def reference_accepts(path: Path) -> bool:
    """Whether the safetensors package opens the file."""
    try:
        with safe_open(path, framework="np") as file:
            file.keys()
    except SafetensorError:
        return False
    return True


def test_verdicts_equal_the_reference(tmp_path: Path) -> None:
    """Over generated files, this parser accepts exactly what the reference accepts."""
    path = tmp_path / "x.safetensors"
    verdicts = {True: 0, False: 0}

    @given(content=files())
    def compare(content: bytes) -> None:
        path.write_bytes(content)
        try:
            parse(content)
        except HeaderError:
            accepted = False
        else:
            accepted = True
        assert accepted == reference_accepts(path)
        verdicts[accepted] += 1

    compare()
    # The comparison means nothing unless both verdicts occur.
    assert min(verdicts.values()) > 0


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    """A name that no UTF-8 can spell is no name, to the reference as well; a whole pair is one."""
    for name, accepted in ((b"\\ud83d", False), (b"\\ud83d\\ude00", True)):
        text = b'{"' + name + b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        path = tmp_path / "x.safetensors"
        path.write_bytes(file_of(text, bytes(1)))
        assert reference_accepts(path) == accepted
        if accepted:
            assert parse(path.read_bytes()).records[0].name == "\N{GRINNING FACE}"
        else:
            with pytest.raises(HeaderError, match="surrogates not allowed"):
                parse(path.read_bytes())


def test_the_reference_keeps_a_duplicate_that_we_refuse(tmp_path: Path) -> None:
    """Two entries of one name over the same bytes: the one place where we are stricter."""
    text = (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}'
    )
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(text, bytes(4)))
    assert reference_accepts(path)
    with pytest.raises(HeaderError, match="occurs twice"):
        parse(path.read_bytes())


_KEYS = st.sampled_from(["a", ":", ":b", " c", "dtype", '\\"', "\\u0061", "é", "", '":'])
_SPACE = st.sampled_from(["", "", "", " ", "\n", "\t"])
_SCALARS = st.sampled_from(
    ["1", "-0", "1.5", "1e999", "18446744073709551616", "NaN", '":"', '"x"']
)


@st.composite
def json_objects(draw: st.DrawFn, depth: int = 2) -> str:
    """The text of an object whose keys may repeat, spaced in any way."""
    pairs = []
    for key in draw(st.lists(_KEYS, max_size=4)):
        nested = depth > 0 and draw(st.booleans())
        value = draw(json_objects(depth - 1)) if nested else draw(_SCALARS)
        name = key if key.startswith("\\") else key.replace('"', '\\"')
        pairs.append(f'{draw(_SPACE)}"{name}"{draw(_SPACE)}:{draw(_SPACE)}{value}{draw(_SPACE)}')
    return "{" + ",".join(pairs) + "}"


def test_the_fast_decoder_never_differs_from_the_strict_one() -> None:
    """Whatever repeats, and however it is spaced or escaped: the same value or an error."""
    seen = {True: 0, False: 0}

    @given(json_objects())
    def compare(text: str) -> None:
        try:
            strict = repr(parse_strict_json(text.encode()))
        except (HeaderError, ValueError):
            seen[False] += 1
            with pytest.raises((HeaderError, ValueError)):
                decode_strict_json(text.encode())
        else:
            seen[True] += 1
            assert repr(decode_strict_json(text.encode())) == strict

    compare()
    assert min(seen.values()) > 0
