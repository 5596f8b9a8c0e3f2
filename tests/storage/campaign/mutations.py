"""Mutations: JSON whose fields are absurd, and bytes that are not what was written; drawn, so that they shrink."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

DEEP = {"<deep>": 2000, "<nested>": 150}  # stand for so many lists in each other

NUMBERS = (0, 1, -1, 2, 7, 8, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**4000, 0.5, 1e308)
TEXTS = (
    "",
    "x",
    "\0",
    "\ud800",
    "..",
    "../x",
    "../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "rank0.safetensors",
    "rank1.safetensors",
    "rank9.safetensors",
    "rank0.safetensors\n",
    "manifest.json",
    "a/b.safetensors",
    "x" * 70_000,
    "x" * 300 + ".safetensors",
    "é\u2028\x85.safetensors",
    "float32",
    "float64",
    "int64",
    "bool",
    "complex128",
    "F32",
    "BOOL",
    "step",
    "params",
    "params.w",
    "params.w.x",
    "xxh3:",
    "xxh3:0000000000000000",
    "\x1b[31m",
    "%s{0}",
)
OTHERS = (
    None,
    True,
    False,
    [],
    {},
    [0],
    [1, 2],
    {"a": 1},
    [2**40] * 9,
    [0, 2**62],
    [10**4000] * 2,
    [-1, -1],
    float("nan"),
    float("inf"),
)

absurd = st.sampled_from([*NUMBERS, *TEXTS, *OTHERS]) | st.integers(-3, 9000) | st.sampled_from(sorted(DEEP))


@st.composite
def json_mutations(draw, record: Any) -> Any:
    """Draw a copy of JSON in which one to three places, at any depth, are not what they were."""
    record = [copy.deepcopy(record)]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        _mutate(draw, record)
    return record[0]


def _mutate(draw, root: list) -> None:
    holder, key = root, 0
    while isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 5)):
        holder = holder[key]
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        key = keys[draw(st.integers(0, len(keys) - 1))]
    value = holder[key]
    how = draw(st.sampled_from(["absurd", "absurd", "near", "drop", "twice", "rename", "swap"]))
    if how == "near" and isinstance(value, int | float):
        holder[key] = value + draw(st.sampled_from([-4096, -8, -1, 1, 8, 4096])) * draw(st.sampled_from([1, 1, 2**40]))
    elif how == "drop" and holder is not root:
        del holder[key]
    elif how == "twice" and isinstance(holder, list) and holder is not root:
        holder.insert(draw(st.integers(0, len(holder))), copy.deepcopy(value))
    elif how in ("twice", "rename") and isinstance(holder, dict):
        holder[draw(st.sampled_from(TEXTS))] = copy.deepcopy(value)
        if how == "rename":
            holder.pop(key)
    elif how == "swap" and holder is not root:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        other = keys[draw(st.integers(0, len(keys) - 1))]
        holder[key], holder[other] = holder[other], holder[key]
    else:
        holder[key] = copy.deepcopy(draw(absurd))


def text_of(record: Any) -> bytes:
    """Return JSON as bytes."""
    text = json.dumps(record)
    for word, depth in DEEP.items():
        text = text.replace(f'"{word}"', "[" * depth + "]" * depth)
    return text.encode()


@st.composite
def byte_mutations(draw, data: bytes) -> bytes:
    """Draw bytes that are these but for one to three changes: flipped, cut off, left out, put in, said twice."""
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([1, 1, 2, 8, 100, 5000]))
        some = draw(st.binary(min_size=1, max_size=9))
        data = draw(
            st.sampled_from(
                [
                    data[:at] + some + data[at + len(some) :],
                    data[:at],
                    data[:at] + data[at + length :],
                    data[:at] + some + data[at:],
                    data[:at] + data[at : at + length] + data[at:],
                    data[:at] + bytes([data[at] ^ 1 << len(some) % 8]) + data[at + 1 :]
                    if at < len(data)
                    else data + some,
                ]
            )
        )
    return data


@st.composite
def headers(draw, data: bytes) -> bytes:
    """Draw a safetensors file whose header, or the length of it, is not what it was."""
    length = int.from_bytes(data[:8], "little")
    record, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    how = draw(st.sampled_from(["json", "json", "json", "bytes", "length", "file"]))
    if how == "length":
        near, far = (0, 1, length - 1, length + 1), (len(data) - 8, len(data), 10**8 + 1, 2**63, 2**64 - 1)
        claimed = draw(st.sampled_from([*near, *far]))
        return claimed.to_bytes(8, "little") + data[8:]
    if how == "file":
        return draw(byte_mutations(data))
    text = text_of(draw(json_mutations(record))) if how == "json" else draw(byte_mutations(data[8 : 8 + length]))
    if draw(st.booleans()):
        text = text.ljust(length)  # as long as before where it can be
    return len(text).to_bytes(8, "little") + text + rest
