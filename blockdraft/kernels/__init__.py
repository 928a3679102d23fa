"""Operations with one contract and a plain PyTorch reference."""
