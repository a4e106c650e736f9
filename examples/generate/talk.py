"""Several sequences at once: the loop from questions to texts, and what each part of it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from model import Model
from text import END, Grammar, chat
from tokenizers import Tokenizer


@dataclass
class Talk:
    """One sequence, its settings by the names that lanewise.sample has for them."""

    name: str
    question: str
    settings: dict[str, Any]
    schema: dict[str, Any] | None = None
    number: int = 0  # tells its noise from the others'
    history: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    ended: bool = False


Choose = Callable[[np.ndarray, Sequence[Talk], np.ndarray], Sequence[int]]  # of logits, talks and masks: tokens


@dataclass
class Times:
    forward: float = 0.0
    sampling: float = 0.0
    rest: float = 0.0  # grammar and text
    tokens: int = 0
    steps: int = 0

    @property
    def total(self) -> float:
        return self.forward + self.sampling + self.rest


def answer(
    model: Model, tokenizer: Tokenizer, talks: Sequence[Talk], choose: Choose, most: int, show: Callable[[Talk], None]
) -> Times:
    """Fills in the answers, up to `most` tokens each. The prompts' pass is not counted."""
    end = tokenizer.token_to_id(END)
    for number, talk in enumerate(talks):
        talk.number, talk.answer, talk.ended = number, [], False
        talk.history = tokenizer.encode(chat(talk.question), add_special_tokens=False).ids
    cache = model.cache(len(talk.history) + most for talk in talks)
    kept = {talk.name: cache.sequence() for talk in talks}
    grammars = {talk.name: Grammar(tokenizer, talk.schema) for talk in talks if talk.schema}
    going, times = list(talks), Times()
    logits = model.forward(cache, [kept[talk.name] for talk in going], [talk.history for talk in going])
    while going:
        began = time.perf_counter()
        masks = np.full((len(going), -(-logits.shape[1] // 32)), -1, np.int32)
        for row, talk in enumerate(going):
            if talk.name in grammars:
                masks[row] = grammars[talk.name].allowed()
        masked = time.perf_counter()
        tokens = choose(logits, going, masks)
        chosen = time.perf_counter()
        for talk, token in zip(going, map(int, tokens), strict=True):
            talk.history.append(token)
            talk.ended = token == end
            if not talk.ended:
                talk.answer.append(token)
                if talk.name in grammars:
                    grammars[talk.name].accept(token)
            show(talk)
        times.tokens, times.steps = times.tokens + len(going), times.steps + 1
        going = [talk for talk in going if not talk.ended and len(talk.answer) < most]
        shown = time.perf_counter()
        if going:
            logits = model.forward(cache, [kept[talk.name] for talk in going], [talk.history[-1:] for talk in going])
        times.sampling += chosen - masked
        times.rest += (masked - began) + (shown - chosen)
        times.forward += time.perf_counter() - shown
    return times
