"""The operations of a model: each has one contract and a plain PyTorch reference."""

from blockdraft.settings.settings import write_no_perf_maps

write_no_perf_maps()  # every module that computes imports this package
