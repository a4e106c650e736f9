"""Between text and tokens: the tokenizer that a GGUF file carries, the form of a chat, a JSON grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # the type of a token that no text spells
END = "<|im_end|>"


def tokenizer_of(fields: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE, digits one by one: what GGUF calls gpt2 with the pre-tokenizer smollm."""
    names = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"].contents()
    control = [name for name, kind in zip(names, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    return tokenizer


def chat(question: str) -> str:
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


class Grammar:
    """The tokens that may come next, if the text is to be JSON of a schema: a row of bits, 1 for allowed."""

    def __init__(self, tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
        vocabulary = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(END))
        self.matcher = llguidance.LLMatcher(
            vocabulary, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        )
        self.bits = llguidance.numpy.allocate_token_bitmask(1, tokenizer.get_vocab_size())

    def allowed(self) -> np.ndarray:
        llguidance.numpy.fill_next_token_bitmask(self.matcher, self.bits, 0)
        return self.bits[0]

    def accept(self, token: int) -> None:
        self.matcher.consume_token(token)
