"""The engine with compressed keys and values: the same answers as plain decoding, and what a step commits.

    python -m benchmarks.kv_engine --prompts FILE.jsonl.gz [--rows 40] [--max-tokens 256] [--long-tokens 2500]
        [--formats auto int8 tq4] [--device cuda] [--json FILE]

Every format answers the same prompts twice through the same kind of cache: with drafts at the full width, all
at once, and one token at a time. The answers must be equal, token for token. Then prompts without their end
are continued for `--long-tokens` each, again both ways: 40 rows of 2,500 are 100,000 tokens in which nothing
may drift. Drafts accepted with `auto` are what the others are held to.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from blockdraft.settings.settings import pin_threads

pin_threads()

from benchmarks import record  # noqa: E402
from blockdraft import LLM, SamplingParams  # noqa: E402
from blockdraft.bench import prompt_files  # noqa: E402

FORMATS = ("auto", "int8", "tq4", "tq4v3")
LONG_PROMPT = 600  # tokens that long answers begin behind: compressed ones are among them
COLUMNS = (
    "format",
    "prompts",
    "tokens",
    "equal",
    "long tokens",
    "long equal",
    "committed",
    "of exact",
    "plain s",
    "s",
)


def prompts_of(llm: LLM, path: Path, most: int, max_tokens: int) -> list[list[int]]:
    """Return prompts that leave room for an answer, the longest first."""
    rows = prompt_files.prompts_of(prompt_files.read(path).rows, name="kv", category="kv")
    found = [llm.tokenizer.encode_chat(one.messages(), add_generation_prompt=True) for one in rows]
    room = llm.engine.plan.max_model_len - max_tokens - 1
    return sorted((ids for ids in found if len(ids) <= room), key=len, reverse=True)[:most]


def both_ways(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
    """Equal answers, tokens, tokens committed by a step, and seconds, plain and with drafts."""
    begun_s = time.perf_counter()
    drafted = llm.generate(prompts, params)
    drafted_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    plain = llm.generate(prompts, replace(params, width=1))
    plain_s = time.perf_counter() - begun_s
    pairs = list(zip(drafted, plain, strict=True))
    num_tokens = sum(len(one.token_ids) for one in drafted)
    return {
        "prompts": len(prompts),
        "equal": sum(a.token_ids == b.token_ids for a, b in pairs),
        "tokens": num_tokens,
        "committed": num_tokens / sum(one.metrics.steps for one in drafted),
        "plain_s": plain_s,
        "drafted_s": drafted_s,
    }


def measure(args: argparse.Namespace, kv_dtype: str) -> dict[str, object]:
    llm = LLM(args.model, kv_dtype=kv_dtype, device=args.device, max_num_seqs=args.rows)
    greedy = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, width=llm.engine.plan.block)
    prompts = prompts_of(llm, args.prompts, args.rows, args.max_tokens)
    short = both_ways(llm, prompts, greedy)
    long = None
    if args.long_tokens:
        random = replace(greedy, max_tokens=args.long_tokens, ignore_eos=True, temperature=0.8, seed=1)
        long = both_ways(llm, [ids[:LONG_PROMPT] for ids in prompts], random)
    return {
        "format": kv_dtype,
        "cache_bytes": llm.engine.cache.num_bytes,
        "short": short,
        "long": long,
    }


def line_of(result: dict[str, dict[str, float]], exact: dict[str, dict[str, float]]) -> list[object]:
    short, long = result["short"], result["long"] or {"tokens": 0, "equal": 0}
    return [
        result["format"],
        short["prompts"],
        short["tokens"],
        short["equal"],
        long["tokens"],
        long["equal"],
        round(short["committed"], 3),
        round(short["committed"] / exact["short"]["committed"], 3),
        round(short["plain_s"], 1),
        round(short["drafted_s"], 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--long-tokens", type=int, default=2500)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--json")
    args = parser.parse_args()
    results: list[dict[str, object]] = []
    for kv_dtype in args.formats:
        results.append(measure(args, kv_dtype))
        record.save(args.json, {**record.context(), "results": results})
        lines = [line_of(result, results[0]) for result in results]  # type: ignore[arg-type]
        print(record.table(list(COLUMNS), lines), flush=True)


if __name__ == "__main__":
    main()
