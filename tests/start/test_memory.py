"""How many pages fit, what is said when nothing does, and how the chunk is cut; the GPU is made up."""

from dataclasses import replace

import pytest
import torch

from blockdraft.cache.spec import bytes_per_token
from blockdraft.errors import CapacityError
from blockdraft.kernels.kernels import kernels_for
from blockdraft.machine.machine import Gpu, Machine
from blockdraft.planner.plan import ASKED, CACHE_HOLDS, MARGIN_BYTES, StartRules
from blockdraft.start import loading, measure, memory
from blockdraft.start.measure import MIN_CHUNK, measure_chunk
from blockdraft.start.memory import fit_pages, memory_explained, why_no_graphs
from tests import tiny

GB = 10**9
TOTAL = 80 * GB


def ignore(line):
    pass


class FakeGpu:
    """60 GB are free beside the weights; a probe keeps `kept` beside its pages, and takes `work` a while."""

    def __init__(self, monkeypatch, work, kept=0):
        self.free, self.work, self.kept, self.captured = 60 * GB, work, kept, []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, TOTAL))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GB)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 10 * GB + self.work)
        monkeypatch.setattr(memory, "Engine", self.probe)
        monkeypatch.setattr(memory, "warm", lambda engine, note, choose: None)

    def probe(self, models, plan):
        gpu = self
        gpu.free = 60 * GB - gpu.kept - (plan.num_pages + 2) * page_bytes(models, plan)

        class Probe:
            cache = type("Cache", (), {"num_pages": plan.num_pages + 2})

            def drop_graphs(self):
                pass

            def __del__(self):
                gpu.free = 60 * GB

            def capture(self, sizes, widths):
                gpu.captured.append((list(sizes), list(widths)))

        return Probe()


def page_bytes(models, plan):
    specs = models.config.layer_specs() + models.draft_config.layer_specs()
    return plan.page_size * bytes_per_token(specs, 2)


def on_gpu(num_pages=10**9, **plan):
    models = tiny.load("float32")
    rules = StartRules(memory_share=0.9)
    plan = replace(tiny.plan("float32"), dtype="bfloat16", num_pages=num_pages, start=rules, **plan)
    models = models.with_kernels(kernels_for(torch.bfloat16, torch.device("cuda")))
    return replace(models, device=torch.device("cuda"), dtype="bfloat16"), plan


def with_share(plan, share):
    return replace(plan, start=replace(plan.start, memory_share=share))


def test_what_the_largest_steps_leave_of_the_budget_becomes_pages(monkeypatch):
    gpu, (models, plan) = FakeGpu(monkeypatch, work=2 * GB, kept=GB), on_gpu()
    fitted = fit_pages(models, with_share(plan, 0.5), ignore)
    room = TOTAL // 2 - 20 * GB - 3 * GB - MARGIN_BYTES  # 20 GB are in use already
    assert fitted.num_pages == room // page_bytes(models, plan)
    assert gpu.captured == [([plan.max_num_seqs], [1, plan.width])]


def test_on_unified_memory_what_the_page_cache_holds_counts_as_free(monkeypatch):
    FakeGpu(monkeypatch, work=0)  # CUDA says that 60 GB are free
    own = Gpu("NVIDIA H100", (9, 0), TOTAL, 75 * GB, "580")
    shared = Gpu("NVIDIA GB10", (12, 1), TOTAL, 70 * GB, "580", is_unified=True)
    machine = Machine(memory_bytes=TOTAL, gpus=(own, shared))
    monkeypatch.setattr(loading, "read_machine", lambda: machine)
    assert loading.gpu_memory(torch.device("cuda:1")) == (70 * GB, TOTAL)
    assert loading.gpu_memory(torch.device("cuda:0")) == (60 * GB, TOTAL)
    assert loading.gpu_memory(torch.device("cuda:2")) == (60 * GB, TOTAL)  # which the driver does not list


def test_pages_on_unified_memory_are_of_what_the_kernel_calls_available(monkeypatch):
    (models, plan), shared = on_gpu(), Gpu("NVIDIA GB10", (12, 1), TOTAL, 70 * GB, "580", is_unified=True)
    machine = Machine(memory_bytes=TOTAL, gpu_bytes=TOTAL, gpus=(shared,))
    FakeGpu(monkeypatch, work=0)
    monkeypatch.setattr(loading, "read_machine", lambda: machine)
    fitted = fit_pages(models, with_share(plan, 0.5), ignore)
    # Nothing is kept by a probe here but its pages, which the kernel's number does not show.
    probed = memory.pages_to_probe(plan) + 2
    room = TOTAL // 2 - 10 * GB - MARGIN_BYTES + probed * page_bytes(models, plan)
    assert fitted.num_pages == room // page_bytes(models, plan)


def test_no_more_pages_than_planned_and_a_size_that_was_asked_for_stays(monkeypatch):
    FakeGpu(monkeypatch, work=GB)
    assert fit_pages(*on_gpu(num_pages=500), ignore).num_pages == 500
    asked = on_gpu()
    sized = asked[1].changed({"cache_bytes": ASKED})
    assert fit_pages(asked[0], sized, ignore) is sized
    on_cpu = tiny.load("float32"), tiny.plan("float32")
    assert fit_pages(*on_cpu, ignore) is on_cpu[1]


def test_a_context_that_does_not_fit_is_refused_with_the_budget_and_the_flags(monkeypatch):
    FakeGpu(monkeypatch, work=51 * GB, kept=GB)
    with pytest.raises(CapacityError) as caught:
        fit_pages(*on_gpu(), ignore)
    words = (
        "--gpu-memory-utilization 0.9 of 80.0 GB = 72.0 GB",
        "52.0 GB of working memory",
        "--max-model-len",
        "fp8",
    )
    assert all(word in str(caught.value) for word in words)


def test_a_context_that_nobody_asked_for_shrinks_to_what_fits(monkeypatch):
    models, planned = on_gpu(max_model_len=10**9)
    planned = planned.changed({"max_model_len": CACHE_HOLDS})
    gpu = FakeGpu(monkeypatch, work=0)
    gpu.work = 52 * GB - MARGIN_BYTES - 100 * page_bytes(models, planned)  # leaves a hundred pages
    plan = fit_pages(models, planned, ignore)
    assert plan.num_pages == 100
    assert plan.max_model_len == 99 * plan.page_size - 2 * plan.block
    gpu.work += 90 * page_bytes(models, planned)
    with pytest.raises(CapacityError):
        fit_pages(models, planned, ignore)


def test_running_out_names_the_budget_and_the_flags(monkeypatch):
    FakeGpu(monkeypatch, work=0)
    with pytest.raises(CapacityError) as caught, memory_explained(on_gpu()[1], torch.device("cuda")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore")
    words = (
        "Tried to allocate 9 GiB",
        "--gpu-memory-utilization 0.9 of 80.0 GB",
        "--max-num-seqs",
        "--quantization fp8",
    )
    assert all(word in str(caught.value) for word in words)
    assert "More" not in str(caught.value)


def test_graphs_can_be_switched_off():
    models, plan = on_gpu()
    assert why_no_graphs(models, plan) is None
    assert why_no_graphs(models, replace(plan, start=StartRules(graphs=False))) == "switched off"
    assert "float64" in why_no_graphs(replace(models, dtype="float64"), plan)
    assert "bfloat16" in why_no_graphs(tiny.load("bfloat16"), plan)


@pytest.mark.parametrize(
    ("operation", "is_captured"), [("attention", False), ("sampling", False), ("norms", True)]
)
def test_a_kernel_that_is_off_ends_graphs_where_its_reference_asks_the_host(operation, is_captured):
    """`training/offline_batch.py` asks the same question."""
    models, _ = on_gpu()
    kernels = kernels_for(torch.float32, torch.device("cpu"), off=frozenset({operation}))
    reason = models.with_kernels(kernels).why_not_captured()
    assert (reason is None) is is_captured
    assert is_captured or operation in reason


@pytest.mark.parametrize(
    ("ms_per_token", "allowed", "chunk"),
    [(0.1, 10, 64), (0.5, 20, 32), (1.0, 17, 16), (9.0, 1, MIN_CHUNK)],
)
def test_the_chunk_is_halved_until_a_step_of_it_is_short_enough(monkeypatch, ms_per_token, allowed, chunk):
    monkeypatch.setattr(measure, "_prefill_ms", lambda engine, chunk: chunk * ms_per_token)
    engine = tiny.engine("none", width=1)
    engine.replan(replace(engine.plan, start=StartRules(max_stall_ms=allowed)))
    assert engine.plan.max_prefill_tokens == 64
    assert measure_chunk(engine, ignore).max_prefill_tokens == chunk
    assert engine.plan.max_prefill_tokens == 64, "the engine follows the new plan when it is told to"


def test_timing_a_chunk_leaves_the_engine_as_it_was():
    engine = tiny.engine("trained")
    assert measure._prefill_ms(engine, 16) > 0
    assert not engine.has_work
    assert engine.stats.num_prefill_steps == 0
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.num_pages
