"""What choosing tokens takes on a CPU, by rules: `OMP_NUM_THREADS=1 python -m benchmarks.choose`.

One row of logits that fall with the logarithm of their rank, as those of the default model do within a story
(100 tokens within 7 of the likeliest, 10,000 within 14), in a random order. Processor time, best of the
rounds; the last column is the PyTorch reference.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from blockdraft.settings.settings import pin_threads

pin_threads()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import record  # noqa: E402
from blockdraft.cache.rows import Rows, RowSampling  # noqa: E402
from blockdraft.kernels.kernels import kernels_for  # noqa: E402
from blockdraft.kernels.sampling import Choose, reference_choose  # noqa: E402

CPU = torch.device("cpu")
RULES: dict[str, dict[str, float]] = {
    "greedy": {},
    "T 1.0": {"temperature": 1.0},
    "T 0.2, top_p 0.9": {"temperature": 0.2, "top_p": 0.9},
    "T 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "T 0.6, top_p 0.95, top_k 50, min_p 0.05": {
        "temperature": 0.6, "top_p": 0.95, "top_k": 50, "min_p": 0.05,
    },
}  # fmt: skip


def make_logits(num_columns: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(1, num_columns, vocab_size, generator=generator).argsort(dim=-1)
    return -1.5 * (ranks + 1.0).log() + 0.3 * torch.randn(ranks.shape, generator=generator)


def best_ms(run: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin_s = time.thread_time()
        run()
        times.append((time.thread_time() - begin_s) * 1e3)
    return min(times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--width", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    native = kernels_for(torch.float32, CPU).choose
    found = []
    for width in options.width:
        logits = make_logits(width, options.vocab)
        for name, rules in RULES.items():
            rows = Rows(max_rows=1, max_pages=1, vocab_size=options.vocab, scratch_page=0, device=CPU)
            rows.place(0, [1, 2, 3], 2, RowSampling(seed=4, output_start=1, **rules))  # type: ignore[arg-type]
            rows.activate([0])

            def run(choose: Choose, logits: Tensor = logits, rows: Rows = rows) -> Tensor:
                anchor = rows.anchor[rows.active][:, None]
                return choose(logits, rows.length[rows.active], anchor, rows.sampling())

            assert torch.equal(run(native), run(reference_choose))
            times = [
                best_ms(lambda one=one: run(one), options.rounds)  # type: ignore[misc]
                for one in (native, reference_choose)
            ]
            found.append([f"{name}, width {width}", *times])
    print(record.table(["rules", "ms", "reference ms"], found))


if __name__ == "__main__":
    main()
