"""A model of the Llama family out of a GGUF file: its matrices in NumPy, its cache and its attention lanewise's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import gguf
import numpy as np

import lanewise

BLOCK = 16  # tokens


class Model:
    def __init__(self, path: str) -> None:
        reader = gguf.GGUFReader(path)

        def number(name: str) -> float:
            return reader.fields[f"llama.{name}"].contents()

        self.layers, self.width = int(number("block_count")), int(number("embedding_length"))
        self.heads, self.key_heads = int(number("attention.head_count")), int(number("attention.head_count_kv"))
        self.head_width = self.width // self.heads
        self.epsilon = np.float32(number("attention.layer_norm_rms_epsilon"))
        self.frequencies = number("rope.freq_base") ** (-np.arange(0, self.head_width, 2) / self.head_width)
        self.fields = reader.fields
        self.weights = {t.name.removesuffix(".weight"): weights_of(t) for t in reader.tensors}

    def cache(self, lengths: Iterable[int]) -> lanewise.PagedKVCache:
        """Room for the keys and values of sequences of these lengths."""
        blocks = sum(-(-length // BLOCK) for length in lengths)
        return lanewise.PagedKVCache(self.layers, blocks, self.key_heads, self.head_width, block_size=BLOCK)

    def forward(
        self, cache: lanewise.PagedKVCache, sequences: Sequence[lanewise.Sequence], tokens: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """The logits after the last of each sequence's new tokens: (sequences, vocabulary). Their keys and values are
        added to the cache. One new token each, or a whole prompt: all go through every matrix together."""
        counts = [len(some) for some in tokens]
        starts = np.concatenate([[0], np.cumsum(counts)])
        positions = np.concatenate([one.length + np.arange(n) for one, n in zip(sequences, counts, strict=True)])
        turns = np.exp(1j * np.outer(positions, self.frequencies)).astype(np.complex64)[:, None]
        slots = cache.reserve(sequences, counts)
        plan = lanewise.AttentionPlan(
            cache.block_tables(sequences),
            cache.lengths(sequences),
            num_heads=self.heads,
            num_kv_heads=self.key_heads,
            block_size=BLOCK,
            query_start=starts,
        )
        x = self.weights["token_embd"][np.concatenate(tokens)]
        for layer in range(self.layers):
            queries, keys, values = self.projected(layer, self.normed(x, f"blk.{layer}.attn_norm"))
            cache.write(slots, turned(keys, turns), values, layer)
            mixed = plan.run(turned(queries, turns), cache.keys(layer), cache.values(layer))
            x += mixed.reshape(x.shape) @ self.weights[f"blk.{layer}.attn_output"].T
            x += self.feed_forward(layer, self.normed(x, f"blk.{layer}.ffn_norm"))
        output = self.weights.get("output", self.weights["token_embd"])
        return self.normed(x[starts[1:] - 1], "output_norm") @ output.T

    def projected(self, layer: int, x: np.ndarray) -> list[np.ndarray]:
        """Queries, keys and values: (tokens, heads, width) each."""
        return [(x @ self.weights[f"blk.{layer}.attn_{name}"].T).reshape(len(x), -1, self.head_width) for name in "qkv"]

    def feed_forward(self, layer: int, x: np.ndarray) -> np.ndarray:
        gate, up, down = (self.weights[f"blk.{layer}.ffn_{name}"] for name in ("gate", "up", "down"))
        opened = x @ gate.T
        opened *= 0.5 * np.tanh(0.5 * opened) + 0.5  # silu, where an exp could overflow
        opened *= x @ up.T
        return opened @ down.T

    def normed(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.epsilon) * self.weights[name]


def weights_of(tensor: gguf.ReaderTensor) -> np.ndarray:
    return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)


def turned(x: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Rotary positions. GGUF keeps the two numbers that turn together side by side, as a complex number has them."""
    return (x.view(np.complex64) * turns).view(np.float32)
