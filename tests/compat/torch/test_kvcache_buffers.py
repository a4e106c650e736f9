"""A PagedKVCache in a tensor's memory, and in what only exports DLPack: nothing is copied, either way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lanewise import PagedKVCache

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 2, 2, 8, 4, 6
AXES = (LAYERS, BLOCKS, 2, HEADS, BLOCK, DIM)  # of a cache in order "layer", layout "HND"; 2: keys, then values
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Exporter:
    """What has nothing but DLPack's two methods."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("how", ["tensor", "bytes of it", "DLPack"])
@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_what_is_appended_is_in_the_tensor_and_what_is_there_is_in_the_cache(dtype: torch.dtype, how: str) -> None:
    memory = torch.zeros(AXES, dtype=dtype)
    buffer: Any = {"tensor": memory, "bytes of it": memory.view(torch.uint8), "DLPack": Exporter(memory)}[how]
    cache = PagedKVCache(LAYERS, BLOCKS, HEADS, DIM, block_size=BLOCK, dtype=NAMES[dtype], order="layer", buffer=buffer)
    assert cache.keys().ctypes.data == memory.data_ptr()
    k, v = (torch.randn(LAYERS, 6, HEADS, DIM, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (0, 1))
    seq = cache.sequence()
    seq.append(k, v)
    blocks = torch.from_numpy(cache.block_tables([seq])[0]).long()
    for half, given in enumerate((k, v)):
        found = memory[:, blocks, half].transpose(2, 3).reshape(LAYERS, -1, HEADS, DIM)
        assert torch.equal(found[:, :6], given) and not found[:, 6:].any()
    memory.neg_()
    assert all(torch.equal(torch.from_numpy(x.view(f"i{x.itemsize}")).view(dtype), -y)
               for x, y in zip(cache.gather([seq]), (k, v), strict=True))  # fmt: skip


def test_memory_that_will_not_do_is_named() -> None:
    def cache(buffer: Any) -> None:
        PagedKVCache(LAYERS, BLOCKS, HEADS, DIM, block_size=BLOCK, buffer=buffer)

    memory = torch.zeros(AXES)
    for buffer, message in (
        (memory[..., ::2], "must be contiguous"),
        (memory[0], "must have 6144 bytes for this cache, got 3072"),
        (torch.zeros(memory.numel() + 1)[1:], "must begin at a multiple of 64 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            cache(buffer)
    with pytest.raises(TypeError, match="CPU memory"):
        cache(torch.zeros(AXES, device="meta"))
    with pytest.raises((TypeError, BufferError, ValueError), match="grad"):
        cache(memory.clone().requires_grad_())


def test_the_tensor_lives_as_long_as_the_cache() -> None:
    cache = PagedKVCache(LAYERS, BLOCKS, HEADS, DIM, block_size=BLOCK, buffer=torch.zeros(AXES))
    others = [torch.full(AXES, 7.0) for _ in range(50)]
    rows = torch.ones(LAYERS, BLOCK * BLOCKS, HEADS, DIM)
    seq = cache.sequence()
    seq.append(rows, rows)
    assert all((other == 7).all() for other in others) and (cache.gather([seq])[0] == 1).all()
