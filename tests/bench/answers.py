"""Answers with figures known beforehand."""

from blockdraft.bench.records import (
    PLAIN,
    SPECULATIVE,
    Answer,
    Ask,
    Group,
    Prompt,
    Speculation,
)

SPECULATED = Speculation(steps=4, drafted=12, accepted=(4, 2, 0))


def prompt(name="p0", *, turns=1, category="code"):
    return Prompt(id=name, category=category, turns=tuple(f"turn {turn} of {name}" for turn in range(turns)))


def answer(
    of,
    *,
    arm=SPECULATIVE,
    turn=0,
    sent_s=0.0,
    ttft_s=0.5,
    latency_s=2.5,
    tokens=11,
    text="hello",
    temperature=0.0,
    speculation=SPECULATED,
    **fields,
):
    """Sent 1 ms late; with the defaults TTFT 0.5 s, TPOT 0.2 s, 4.4 tok/s."""
    error = fields.get("error")
    return Answer(
        ask=Ask(
            prompt=of,
            arm=arm,
            max_tokens=64,
            temperature=temperature,
            cache_salt="salt",
            number=fields.pop("number", 0),
        ),
        turn=turn,
        planned_s=sent_s - 0.001,
        sent_s=sent_s,
        first_s=None if error else sent_s + ttft_s,
        end_s=sent_s + latency_s,
        gaps_s=[] if error else [0.4] * 5,
        prompt_tokens=None if error else 100,
        cached_tokens=None if error else 8,
        completion_tokens=None if error else tokens,
        text="" if error else text,
        speculation=None if error or arm == PLAIN else speculation,
        **fields,
    )


def group(
    answers,
    *,
    busy_s=10.0,
    workload="code",
    concurrency=1,
    category="all",
    arm=SPECULATIVE,
    temperature=0.0,
    depth=0,
    rate=None,
    metered=None,
):
    key = {
        "workload": workload,
        "category": category,
        "concurrency": concurrency,
        "rate": rate,
        "depth": depth,
        "temperature": temperature,
    }
    return Group(key=key, arm=arm, answers=answers, busy_s=busy_s, metered=metered)


def prompts(count, *, turns=1, category="code"):
    return [prompt(f"{category}{number}", turns=turns, category=category) for number in range(count)]


def arms(count=8, *, gain=2.0, **of_group):
    """Two groups over the same prompts; plain answers take `gain` times as long, all texts are equal."""
    asked = prompts(count)
    groups = []
    for arm, factor in ((SPECULATIVE, 1.0), (PLAIN, gain)):
        answers = [
            answer(
                one,
                arm=arm,
                sent_s=10.0 * number,
                ttft_s=0.5,
                latency_s=0.5 + factor * (2.0 + 0.1 * (number % 4)),
                text=f"answer to {one.id}",
            )
            for number, one in enumerate(asked)
        ]
        busy_s = sum(one.latency_s for one in answers)
        groups.append(group(answers, arm=arm, busy_s=busy_s, **of_group))
    return groups


HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m|*_[x](y)"


def facts(**more):
    """Return the arguments of a report besides its groups."""
    return {
        "endpoint": {
            "kind": "blockdraft",
            "version": "0.1.0",
            "url": "http://127.0.0.1:8000",
            "model": "a/model",
            "title": None,
            "drafter": "a/drafter",
            "drafter_kind": None,
            "drafter_hash": "0123456789abcdef",
            "kv_dtype": None,
        },
        "options": {"seed": 1, "workloads": ["code"]},
        "machine": {"platform": "Linux", "cpu": "a CPU", "num_cpus": 2, "gpus": []},
        "date": "2026-11-15T12:00:00Z",
        **more,
    }


def workloads(*, gain=2.0):
    """Two workloads at two loads, both arms; one request of each arm of the second workload fails."""
    found = []
    for workload in ("code", "prose"):
        for concurrency in (1, 8):
            both = arms(6, gain=gain, workload=workload, concurrency=concurrency)
            if workload == "prose":
                for one in both:
                    one.answers[0] = answer(one.answers[0].ask.prompt, arm=one.arm, error="HTTP 500: full")
            found += both
    return found
