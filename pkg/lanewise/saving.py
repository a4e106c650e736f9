"""Sequences of a cache as bytes, and back: the format that docs/kvcache.md describes.

Every checksum continues the one before it, so that a part of another save does not fit in. What is read is checked
before memory is taken for it. A restore that fails has changed nothing.
"""

from __future__ import annotations

import io
import operator
import os
import secrets
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import DamagedSaveError
from .storage import Geometry, Storage

VERSION = 1
MAGIC = b"lw-kv\r\n\x1a"  # a transfer that takes it for text changes it
PROLOGUE = struct.Struct("<8sIQI")  # magic, version, bytes of the header, its checksum
CHECKSUM = struct.Struct("<I")
CHUNK_BYTES = 4 << 20
MUST_AGREE = ("num_layers", "num_kv_heads", "block_size", "head_dim", "v_head_dim", "dtype")


class Store(Protocol):
    """Where saves can go and come from."""

    def put(self, key: str, data: bytes, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...


class Saving(Future[Any]):
    """A save under way: a Future of what PagedKVCache.save gives."""

    def __init__(self, size: int, data: Iterator[Any], to: Any, key: str | None, release: Callable[[], None]) -> None:
        super().__init__()
        self._written, self._size, self._data = 0, size, data
        self._to, self._key, self._release = to, key, release

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes made so far, and those there will be."""
        return self._written, self._size

    def run(self) -> None:
        """Saves, and gives the blocks back however it ends; or only gives them back if it has been cancelled."""
        wanted = self.set_running_or_notify_cancel()
        try:
            result = write(self._counted(), self._to, self._key) if wanted else None
        except BaseException as error:
            self._release()
            self.set_exception(error)
        else:
            self._release()
            if wanted:
                self.set_result(result)

    def _counted(self) -> Iterator[Any]:
        for piece in self._data:
            yield piece
            self._written += len(piece)


@dataclass(frozen=True)
class Part:
    """A sequence in a save: its table has numbers of saved blocks, or -1 for dropped ones."""

    length: int
    extra: dict[str, Any]
    table: NDArray[np.int64]
    tokens: NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """What a header says of the rest."""

    geometry: Geometry  # of one chunk
    blocks: int
    parts: list[tuple[int, int, int, dict[str, Any]]]  # length, blocks and tokens of each sequence, and its extra keys

    @property
    def index_bytes(self) -> int:
        return 8 * sum(blocks + tokens for _, blocks, tokens, _ in self.parts)

    @property
    def bytes_behind_header(self) -> int:
        chunks = -(-self.blocks // self.geometry.num_blocks)
        return self.index_bytes + self.blocks * self.geometry.block_bytes + CHECKSUM.size * (1 + chunks)

    def chunks(self) -> Iterator[slice]:
        step = self.geometry.num_blocks
        return (slice(at, min(at + step, self.blocks)) for at in range(0, self.blocks, step))


# ---- writing ----


def pieces(storage: Storage, ids: NDArray[np.int64], parts: list[Part]) -> tuple[int, Iterator[Any]]:
    """The bytes of a save, and the save piece by piece: each is to be used before the next is asked for."""
    geometry = storage.geometry
    chunk = max(1, min(len(ids), CHUNK_BYTES // geometry.block_bytes))
    numbers = [(part.length, len(part.table), len(part.tokens), encoded(part.extra)) for part in parts]
    plan = Plan(geometry.staging(chunk), len(ids), numbers)
    import json  # not at the top: `import lanewise` is to be quick

    header = json.dumps({"byteorder": sys.byteorder, **asdict(plan)}).encode()

    def produce() -> Iterator[Any]:
        crc = zlib.crc32(header)
        yield PROLOGUE.pack(MAGIC, VERSION, len(header), crc) + header
        index = b"".join(numbers.tobytes() for part in parts for numbers in (part.table, part.tokens))
        crc = zlib.crc32(index, crc)
        yield index + CHECKSUM.pack(crc)
        staging = Storage.new(plan.geometry, storage.element)
        for chunk in plan.chunks():
            count = chunk.stop - chunk.start
            staging.copy_from(storage, ids[chunk], np.arange(count))
            data = staging.region[: count * geometry.block_bytes].data
            crc = zlib.crc32(data, crc)
            yield data
            yield CHECKSUM.pack(crc)

    return PROLOGUE.size + len(header) + plan.bytes_behind_header, produce()


def encoded(extra: dict[str, Any]) -> dict[str, Any]:
    """Extra keys in JSON, bytes as {"hex": digits}."""
    return {
        name: [[encoded_key(key), position] for key, position in value] if name == "images" else encoded_key(value)
        for name, value in extra.items()
    }


def encoded_key(key: Any) -> Any:
    return {"hex": key.hex()} if isinstance(key, bytes) else key if isinstance(key, str) else operator.index(key)


def decoded(extra: dict[str, Any]) -> dict[str, Any]:
    if not extra.keys() <= {"adapter", "salt", "images"}:
        raise ValueError(f"extra keys must be adapter, salt or images, got {list(extra)}")
    return {
        name: [(decoded_key(key), position) for key, position in value] if name == "images" else decoded_key(value)
        for name, value in extra.items()
    }


def decoded_key(key: Any) -> Any:
    return bytes.fromhex(key["hex"]) if isinstance(key, dict) else key


def write(data: Iterator[Any], to: Any, key: str | None) -> bytes | None:
    """To a path, to an object with put, or for None as bytes."""
    if isinstance(to, str | os.PathLike):
        write_file(Path(to), data)
        return None
    everything = io.BytesIO()
    for piece in data:
        everything.write(piece)
    if to is None:
        return everything.getvalue()
    to.put(key, everything.getvalue())
    return None


def write_file(target: Path, data: Iterator[Any]) -> None:
    """Under another name first: a file of this name is whole, whenever the process or the machine stops."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            for piece in data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def check_place(place: Any, key: str | None, method: str) -> None:
    """Objects to what has neither a path nor the method, before anything is done."""
    if isinstance(place, str | os.PathLike):
        if key is not None:
            raise ValueError(f"key is for an object with {method}, got {key!r} with a path")
    elif not callable(getattr(place, method, None)):
        raise TypeError(f"need a path or an object with {method}, got {type(place).__name__}")
    elif not isinstance(key, str):
        raise TypeError(f"key must be a str for an object with {method}, got {key!r}")


# ---- reading ----


class Source:
    """What is left of a save, which nobody has looked at yet."""

    def __init__(self, data: Any, size: int) -> None:
        self._data = data
        self.left = size

    def into(self, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")
        if len(view) > self.left or self._data.readinto(view) != len(view):
            raise DamagedSaveError(f"the save is cut off: {len(view)} bytes were to follow, {self.left} do")
        self.left -= len(view)

    def take(self, size: int) -> bytearray:
        if size > self.left:
            raise DamagedSaveError(f"the save is cut off: {size} bytes were to follow, {self.left} do")
        buffer = bytearray(size)
        self.into(buffer)
        return buffer

    def check(self, crc: int, what: str) -> None:
        (written,) = CHECKSUM.unpack(self.take(CHECKSUM.size))
        if written != crc:
            raise DamagedSaveError(f"the save is damaged: {what} has checksum {crc:08x}, not {written:08x}")


@contextmanager
def opened(source: Any, key: str | None) -> Iterator[Source]:
    """Of bytes, a path, or an object with get."""
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            yield Source(file, os.fstat(file.fileno()).st_size)
        return
    data = source if isinstance(source, bytes | bytearray | memoryview) else source.get(key)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"get({key!r}) must give bytes, got {type(data).__name__}")
    yield Source(io.BytesIO(data), memoryview(data).nbytes)


def read_index(source: Source, geometry: Geometry) -> tuple[Plan, list[Part], int]:
    """What a save has for a cache of this geometry, and the checksum so far."""
    plan, crc = read_plan(source)
    for name in MUST_AGREE:
        theirs, ours = getattr(plan.geometry, name), getattr(geometry, name)
        if theirs != ours:
            raise ValueError(
                f"the save has {name} {theirs}, this cache {ours}; restore it into a cache like the one saved, "
                "and move the sequences by to()"
            )
    index = source.take(plan.index_bytes)
    crc = zlib.crc32(index, crc)
    source.check(crc, "the index")
    numbers, parts, at = np.frombuffer(index, np.int64), [], 0
    for length, blocks, tokens, extra in plan.parts:
        parts.append(Part(length, extra, numbers[at : at + blocks], numbers[at + blocks : at + blocks + tokens]))
        at += blocks + tokens
    check_tables(plan, parts)
    return plan, parts, crc


def read_blocks(source: Source, plan: Plan, crc: int, storage: Storage, ids: NDArray[np.int64]) -> None:
    """Puts the blocks of a save into these."""
    staging = Storage.new(plan.geometry, storage.element)
    for number, chunk in enumerate(plan.chunks()):
        data = staging.region[: (chunk.stop - chunk.start) * plan.geometry.block_bytes].data
        source.into(data)
        crc = zlib.crc32(data, crc)
        source.check(crc, f"chunk {number}")
        storage.copy_from(staging, np.arange(chunk.stop - chunk.start), ids[chunk])


def read_plan(source: Source) -> tuple[Plan, int]:
    """What is to follow, and the checksum so far."""
    magic, version, size, crc = PROLOGUE.unpack(source.take(PROLOGUE.size))
    if magic != MAGIC:
        raise DamagedSaveError(f"not a save of a lanewise cache: it begins with {bytes(magic)!r}")
    if version != VERSION:
        raise ValueError(f"the save has version {version}, this lanewise reads version {VERSION}")
    header = source.take(size)
    if zlib.crc32(header) != crc:
        raise DamagedSaveError(f"the save is damaged: the header has checksum {zlib.crc32(header):08x}, not {crc:08x}")
    plan = plan_of(header)
    if plan.bytes_behind_header != source.left:
        raise DamagedSaveError(f"the save is to go on for {plan.bytes_behind_header} bytes, {source.left} are there")
    return plan, crc


def plan_of(header: bytes | bytearray) -> Plan:
    import json

    try:
        content = json.loads(header)
        order, blocks, geometry = content["byteorder"], content["blocks"], Geometry(**content["geometry"])
        parts = [(length, table, tokens, decoded(extra)) for length, table, tokens, extra in content["parts"]]
        sizes = [blocks, *(size for part in parts for size in part[:3])]
        if not all(type(size) is int and 0 <= size < 1 << 47 for size in sizes):
            raise ValueError(f"sizes must be in [0, 2**47), got {sizes}")
        if geometry.num_blocks > max(1, blocks):
            raise ValueError(f"chunks of {geometry.num_blocks} blocks, of {blocks} in all")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedSaveError(f"the header of the save makes no sense: {error}") from error
    if order != sys.byteorder:
        raise ValueError(f"the save is of a {order}-endian machine, this one is {sys.byteorder}-endian")
    return Plan(geometry, blocks, parts)


def check_tables(plan: Plan, parts: list[Part]) -> None:
    """Each table has the blocks its length needs, each once; and every block is in some table."""
    size, seen = plan.geometry.block_size, np.zeros(plan.blocks, bool)
    for i, part in enumerate(parts):
        used = part.table[part.table != -1]
        if (
            len(part.table) != -(-part.length // size)
            or len(used) != len(np.unique(used))
            or not ((used >= 0) & (used < plan.blocks)).all()
            or (part.length % size and part.table[-1] == -1)
        ):
            raise DamagedSaveError(f"sequence {i} of the save has a table that cannot be")
        seen[used] = True
    if not seen.all():
        raise DamagedSaveError(f"block {int(np.argmin(seen))} of the save is in no sequence")
