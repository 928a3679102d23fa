"""Operations with one contract and a plain PyTorch reference."""

from blockdraft.settings.settings import write_no_perf_maps

write_no_perf_maps()  # whoever computes comes through here
