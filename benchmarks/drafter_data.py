"""The prompts that the default drafter is trained on, made of a pool of prompts: short ones and long ones.

    python -m benchmarks.drafter_data --pool train_prompts.jsonl.xz --short short.jsonl --long long.jsonl

`short` has the pool's prompts in a new mixture: code and maths for the most part, some of them asked several
times (answers are sampled, so each is another one) and in the words that people's benchmarks use. `long` has
prompts of about 1,000 to 6,500 tokens, put together from passages, code, functions and problems of the pool:
summaries, copies, code to explain and to rewrite, questions, lists of problems, calls of tools.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# How often a prompt is asked on average: by its category, and by its source where that says more.
BY_CATEGORY = {
    "code": 1.3,
    "math": 1.0,
    "qa": 0.7,
    "dialogue": 0.5,
    "summarise": 0.5,
    "prose": 0.4,
    "reasoning": 0.35,
    "json": 0.35,
    "html": 0.3,
    "translate": 0.2,
}
BY_SOURCE = {
    "gsm8k_train": 3.0,
    "gsm8k_train_perturbed": 2.0,
    "hendrycks_math_train": 1.5,
    "mawps": 2.0,
    "deepmind_mathematics": 0.6,
    "reasoning_gym_math": 0.6,
    "mbpp_train": 14.0,
    "exercism": 2.0,
    "self_instruct_starcoder": 2.0,
    "gpteacher_codegen": 1.5,
    "py_functions": 3.0,
    "python_puzzles_p3": 2.0,
    "nl2bash": 0.4,
    "tldr_commands": 0.3,
    "text2sql_wikisql_advising": 0.5,
    "chatbot_arena_1k": 3.0,
    "oasst_octopack_manual": 2.0,
    "anthropic_helpful_seed": 2.0,
    "oasst_en_100": 3.0,
    "oasst_qlora_val": 3.0,
    "self_instruct_seeds": 3.0,
    "followbench": 2.0,
    "dolly_hhrlhf_1k": 2.0,
    "longfact": 1.5,
    "gpteacher_roleplay": 1.0,
}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n"
MATHS_WORDS = (BOXED, "\nLet's think step by step.", "Solve the following problem. Show your work.\n\n")
EXPERT = "You are an expert Python programmer, and here is your task: "
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer briefly.",
    "You are an expert programmer. Answer with code.",
    "You are a patient teacher who explains every step.",
    "Answer in plain English and never invent facts.",
    "You are an assistant inside a web shop. Be polite and short.",
    "You write clear, well structured texts.",
    "Reply in JSON whenever that is possible.",
)
SYSTEM_SHARE = 0.08  # of the short prompts
CHARS = 4.1  # of a token, about; code has fewer
CODE_CHARS = 3.0
SHORTEST, LONGEST = 900, 6500  # tokens of a long prompt, about


def read_pool(path: Path) -> list[Row]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


# ---- short ones


def short_prompts(pool: list[Row], chance: random.Random, times: float = 1.0) -> list[Row]:
    """Return the pool in its new mixture, shuffled, so that every beginning has that mixture."""
    found = []
    for row in pool:
        wanted = times * BY_SOURCE.get(row["source"], BY_CATEGORY[row["category"]])
        count = int(wanted) + (chance.random() < wanted % 1)
        for number in range(count):
            messages = row["messages"] if number == 0 else reworded(row, chance)
            if chance.random() < SYSTEM_SHARE:
                messages = [{"role": "system", "content": chance.choice(SYSTEMS)}, *messages]
            found.append({"category": row["category"], "messages": messages})
    chance.shuffle(found)
    return found


def reworded(row: Row, chance: random.Random) -> list[Row]:
    """Rewrite a task in the words of a benchmark, if it is of that kind."""
    text, source = row["messages"][0]["content"], row["source"]
    if source in ("gsm8k_train", "gsm8k_train_perturbed", "hendrycks_math_train", "mawps"):
        for words in MATHS_WORDS:
            text = text.replace(words, "")
        text = text.strip() + BOXED
    elif source == "mbpp_train" and chance.random() < 0.7:
        text = text.removeprefix(EXPERT).split(" Your code should pass")[0].strip()
    elif source == "py_functions" and '"""' in text and "```python\ndef " in text:
        text = SOLVE + text[text.index("```python\n") :]
    return [{"role": "user", "content": text}, *row["messages"][1:]]


# ---- long ones


class Material:
    """Pieces of the pool, by what they are."""

    def __init__(self, pool: list[Row]) -> None:
        self.passages: list[str] = []
        self.books: list[str] = []
        self.code: dict[str, list[str]] = {}  # by language
        self.tools: list[tuple[str, str]] = []  # functions, and what a user wants of them
        self.problems: list[str] = []
        self.questions: list[tuple[str, str]] = []  # a passage, and a question about it
        for row in pool:
            self._take(row, row["messages"][0]["content"])

    def _take(self, row: Row, text: str) -> None:
        source = row["source"]
        for language, body in re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL):
            if len(body) > 200 and row["category"] == "code":
                self.code.setdefault(language, []).append(body.rstrip())
        _, _, rest = text.partition("\n\n")
        if source.startswith("books_") and len(rest) > 400:
            self.books.append(rest)
        elif row["category"] in ("summarise", "html") and len(rest) > 600 and "```" not in rest:
            self.passages.append(rest)
        elif source == "seal_tools" and text.startswith("You have access"):
            functions, _, wish = text.partition("]\n")
            self.tools.append((functions.partition("\n")[2] + "]", wish.strip()))
        elif source in ("gsm8k_train", "gsm8k_train_perturbed", "mawps") and len(row["messages"]) == 1:
            self.problems.append(
                text.replace(BOXED, "").replace(MATHS_WORDS[1], "").removeprefix(MATHS_WORDS[2])
            )
        elif (
            source in ("xquad_context_qa", "medquad_passage_qa", "boolq") and "\n" in text and len(text) > 500
        ):
            passage, _, question = text.rpartition("\n")
            if 10 < len(question) < 300:
                self.questions.append((passage.strip(), question.strip()))


def long_prompts(material: Material, count: int, chance: random.Random) -> list[Row]:
    kinds = list(KINDS.items())
    found = []
    for number in range(count):
        name, make = kinds[number % len(kinds)]
        size = math.exp(chance.uniform(math.log(SHORTEST), math.log(LONGEST)))
        turns = make(material, size, chance)
        messages = [{"role": "user", "content": turn} for turn in turns]
        found.append({"category": f"long-{name}", "messages": messages})
    chance.shuffle(found)
    return found


def filled(pieces: list[str], num_chars: float, chance: random.Random) -> list[str]:
    """Pieces at random that have about so many characters together."""
    chosen, size = [], 0
    while size < num_chars:
        piece = chance.choice(pieces)
        piece = piece[: max(200, int(num_chars - size))]
        chosen.append(piece)
        size += len(piece) + 2
    return chosen


def around(instruction: str, text: str, chance: random.Random) -> str:
    """Put the instruction before the text, or after it."""
    return f"{instruction}\n\n{text}" if chance.random() < 0.6 else f"{text}\n\n{instruction}"


def passages(material: Material, size: float, chance: random.Random) -> str:
    pieces = material.books if chance.random() < 0.5 else material.passages
    return "\n\n".join(filled(pieces, size * CHARS, chance))


def summary(material: Material, size: float, chance: random.Random) -> list[str]:
    asked = chance.choice(
        (
            "Write a summary of this text.",
            "Summarise the text in one paragraph.",
            "What is this text about? Summarise it in {n} sentences.",
            "Give me a summary of about {m} words.",
            "Read the text and tell me its main ideas.",
            "List the {n} most important points of the text as bullet points.",
            "Extract the key points.",
            "Write a headline and a short summary.",
        )
    ).format(n=chance.randint(3, 9), m=chance.choice((50, 100, 150, 200, 300)))
    return [around(asked, passages(material, size, chance), chance)]


def continuation(material: Material, size: float, chance: random.Random) -> list[str]:
    asked = chance.choice(
        (
            "Continue this story in the same style.",
            "Write what happens next.",
            "Go on with the text where it stops.",
            "Continue the following passage for two more paragraphs.",
        )
    )
    return [around(asked, "\n\n".join(filled(material.books, size * CHARS, chance)), chance)]


def copy(material: Material, size: float, chance: random.Random) -> list[str]:
    asked = chance.choice(
        (
            "Copy the text below word for word.",
            "Repeat the following text exactly as it is.",
            "Write the text again and correct only its spelling.",
            "Quote the first paragraph of the text.",
            "Quote the last paragraph of the text.",
            "Reproduce this document without any changes.",
        )
    )
    return [around(asked, passages(material, size, chance), chance)]


def code_task(material: Material, size: float, chance: random.Random) -> list[str]:
    languages = sorted(material.code, key=lambda name: -len(material.code[name]))[:8]
    language = "python" if chance.random() < 0.6 else chance.choice(languages)
    code = "\n\n\n".join(filled(material.code[language], size * CODE_CHARS, chance))
    asked = chance.choice(
        (
            "Explain what this code does.",
            "Explain each function of this file in a sentence or two.",
            "Rewrite this code with better names.",
            "Add type hints and docstrings to this code and return all of it.",
            "Add comments to this code. Return the whole file.",
            "Refactor this code. Return the complete new version.",
            "Find possible bugs in this code and fix them.",
            "Write unit tests for this code.",
            "Return this file unchanged, but with a docstring for every function.",
        )
    )
    return [around(asked, f"```{language}\n{code}\n```", chance)]


def question(material: Material, size: float, chance: random.Random) -> list[str]:
    passage, asked = chance.choice(material.questions)
    rest = size * CHARS - len(passage)
    pieces = [*filled(material.passages, max(rest, 400), chance), passage]
    chance.shuffle(pieces)
    text = "\n\n".join(f"[{number}] {piece}" for number, piece in enumerate(pieces, 1))
    words = chance.choice(("Answer from the passages: ", "Use the documents to answer. ", ""))
    turns = [around(words + asked, text, chance)]
    if chance.random() < 0.3:
        turns.append(
            chance.choice(("Which passage says so?", "Explain that in more detail.", "Are you sure?"))
        )
    return turns


def problems(material: Material, size: float, chance: random.Random) -> list[str]:
    listed = filled(material.problems, size * CHARS, chance)
    text = "\n".join(f"{number}. {problem}" for number, problem in enumerate(listed, 1))
    asked = chance.choice(
        (
            "Solve all of these problems step by step.",
            f"Solve problem {chance.randint(1, len(listed))}." + BOXED,
            "Solve the last problem of the list." + BOXED,
            "Give the answer to each problem in a JSON list.",
        )
    )
    return [around(asked, text, chance)]


def tools(material: Material, size: float, chance: random.Random) -> list[str]:
    chosen = [chance.choice(material.tools)]
    while sum(len(functions) for functions, _ in chosen) < size * CODE_CHARS:
        chosen.append(chance.choice(material.tools))
    wish = chosen[0][1]
    chance.shuffle(chosen)
    listed = "\n".join(functions for functions, _ in chosen)
    return [f"You have access to the following functions:\n{listed}\n{wish}"]


Maker = Callable[[Material, float, random.Random], list[str]]
KINDS: dict[str, Maker] = {
    "summary": summary,
    "code": code_task,
    "copy": copy,
    "question": question,
    "story": continuation,
    "rewrite": code_task,
    "keypoints": summary,
    "problems": problems,
    "tools": tools,
}


def write(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--short", type=Path, required=True)
    parser.add_argument("--long", type=Path, required=True)
    parser.add_argument("--num-long", type=int, default=2000)
    parser.add_argument("--times", type=float, default=1.0, help="how often the short ones are asked, all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pool = read_pool(args.pool)
    long = long_prompts(Material(pool), args.num_long, random.Random(args.seed))
    short = short_prompts(pool, random.Random(args.seed), args.times)
    write(args.long, long)
    write(args.short, short)
    print(f"{len(short):,} short prompts, {len(long):,} long ones")


if __name__ == "__main__":
    main()
