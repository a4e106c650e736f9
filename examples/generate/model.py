"""A model of the Llama family out of a GGUF file, in NumPy: what it takes to go from tokens to logits."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np


class Cache:
    """The keys and values of one sequence."""

    def __init__(self, model: Model, room: int) -> None:
        shape = (model.layers, model.key_heads, room, model.head_width)
        self.keys, self.values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.length = 0


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

    def forward(self, caches: Sequence[Cache], tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """The logits after the last of each sequence's new tokens: (sequences, vocabulary). Their keys and values are
        added to the caches. One new token each, or a whole prompt: all go through every matrix together."""
        counts = [len(some) for some in tokens]
        ends = np.cumsum(counts)
        parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        positions = np.concatenate([cache.length + np.arange(n) for cache, n in zip(caches, counts, strict=True)])
        turns = np.exp(1j * np.outer(positions, self.frequencies)).astype(np.complex64)[:, None]
        x = self.weights["token_embd"][np.concatenate(tokens)]
        for layer in range(self.layers):
            x += self.attention(layer, self.normed(x, f"blk.{layer}.attn_norm"), turns, caches, parts)
            x += self.feed_forward(layer, self.normed(x, f"blk.{layer}.ffn_norm"))
        for cache, count in zip(caches, counts, strict=True):
            cache.length += count
        output = self.weights.get("output", self.weights["token_embd"])
        return self.normed(x[ends - 1], "output_norm") @ output.T

    def attention(
        self, layer: int, x: np.ndarray, turns: np.ndarray, caches: Sequence[Cache], parts: Sequence[slice]
    ) -> np.ndarray:
        def projected(name: str, heads: int) -> np.ndarray:
            y: np.ndarray = x @ self.weights[f"blk.{layer}.attn_{name}"].T
            return y.reshape(len(x), heads, self.head_width)

        queries = turned(projected("q", self.heads), turns)
        keys, values = turned(projected("k", self.key_heads), turns), projected("v", self.key_heads)
        mixed = np.empty_like(x)
        for cache, part in zip(caches, parts, strict=True):
            end = cache.length + part.stop - part.start
            cache.keys[layer, :, cache.length : end] = keys[part].swapaxes(0, 1)
            cache.values[layer, :, cache.length : end] = values[part].swapaxes(0, 1)
            mixed[part] = attended(queries[part], cache.keys[layer, :, :end], cache.values[layer, :, :end])
        return mixed @ self.weights[f"blk.{layer}.attn_output"].T

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


def attended(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(T, heads * width) of T queries, the last of them at the last key. Heads share keys in groups."""
    count, heads, width = queries.shape
    grouped = queries.reshape(count, len(keys), heads // len(keys), width).transpose(1, 2, 0, 3)
    scores = grouped @ keys[:, None].swapaxes(-1, -2) * np.float32(width**-0.5)
    if count > 1:
        last = keys.shape[1] - count + np.arange(count)[:, None]
        scores[..., np.arange(keys.shape[1]) > last] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ values[:, None]).transpose(2, 0, 1, 3).reshape(count, heads * width)
