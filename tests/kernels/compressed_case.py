"""A case of attention over compressed pages, for any kernels: rows of random keys in scattered pages."""

from dataclasses import dataclass, replace

import torch

from blockdraft.kernels import kv_codec
from blockdraft.kernels.attention import Blocks, Mask
from blockdraft.kernels.kv_compressed import Codes, CompressedPages, Tiles
from blockdraft.kernels.kv_positions import PositionRule
from tests.kernels.dense_compressed import reference_attend_compressed


@dataclass
class Case:
    """Rows of `lengths[r]` tokens; the last counts[r] of them are the block that attends."""

    pages: CompressedPages
    blocks: Blocks
    q: torch.Tensor  # [N, H, D], as attention takes them
    exact: list[tuple[torch.Tensor, torch.Tensor]]  # of each row keys and values [L, G, D], as stored
    mask: Mask

    @property
    def tiles(self):
        """All that the rows' queries, and those of the next block, read compressed."""
        rule, blocks = self.pages.rule, self.blocks
        lengths = blocks.starts + torch.tensor(blocks.counts)
        nothing = torch.zeros_like(lengths)
        most = int(rule.compressed_end(lengths).max()) // 64
        return Tiles(
            blocks.table,
            blocks.exact_table,
            blocks.rows,
            nothing,
            lengths,
            rule,
            max(most, 1),
            blocks.page_size,
        )

    def rows(self):
        return torch.split(self.q, list(self.blocks.counts))

    def expected(self):
        """Each row alone: dequantise, then attend."""
        parts = [
            reference_attend_compressed(
                q, exact, tuple(map(self._back, self._codecs, exact)), self.pages.rule, self.mask
            )
            for q, exact in zip(self.rows(), self.exact, strict=True)
        ]
        out = torch.cat(parts)
        return kv_codec.rotate_back(out.float()).to(out.dtype) if self.pages.format.is_rotated else out

    @property
    def _codecs(self):
        return self.pages.format.keys, self.pages.format.values

    @staticmethod
    def _back(codec, x):
        return codec.decode(codec.encode(x)).to(x.dtype)


def make(
    *,
    form="tq4",
    lengths=(300,),
    counts=(16,),
    heads=4,
    groups=2,
    dim=32,
    dtype=torch.float32,
    page_size=16,
    rule=None,
    seed=0,
    mask=None,
):
    """A case whose exact pages hold everything, and whose compressed ones hold nothing yet."""
    rng = torch.Generator().manual_seed(seed)
    rule = rule or PositionRule()
    format = kv_codec.FORMATS[form]
    per_row = -(-max(lengths) // page_size)
    num_pages = 2 + len(lengths) * per_row
    tables = [
        (2 + torch.randperm(num_pages - 2, generator=rng)).view(len(lengths), per_row) for _ in range(2)
    ]
    keys, values = (torch.zeros(1, groups, num_pages * page_size, dim, dtype=dtype) for _ in range(2))
    exact = []
    for row, length in enumerate(lengths):
        k, v = (torch.randn(length, groups, dim, generator=rng).to(dtype) for _ in range(2))
        position = torch.arange(length)
        place = tables[1][row, position // page_size] * page_size + position % page_size
        keys[0][:, place], values[0][:, place] = k.transpose(0, 1), v.transpose(0, 1)
        exact.append((k, v))
    slots = num_pages * page_size
    stores = [
        Codes(
            torch.randint(
                0, 255, (1, groups, slots, codec.num_bytes(dim) - 2), generator=rng, dtype=torch.uint8
            ),
            torch.full((1, groups, slots), float("nan"), dtype=torch.float16),  # whoever reads it, shows it
        )
        for codec in (format.keys, format.values)
    ]
    for store in stores:
        store.codes[:, :, 0] = 0
        store.scale[:, :, 0] = 0
    blocks = Blocks(
        pages=tables[0],
        exact_pages=tables[1],
        starts=torch.tensor([length - count for length, count in zip(lengths, counts, strict=True)]),
        counts=tuple(counts),
        page_size=page_size,
    )
    q = torch.randn(sum(counts), heads, dim, generator=rng).to(dtype)
    pages = CompressedPages(format, rule, keys, values, *stores)
    return Case(pages, blocks, q, exact, mask or Mask(scale=dim**-0.5))


def on(case, device):
    """Move a case to a device."""
    move = lambda x: x.to(device)  # noqa: E731
    pages = case.pages
    moved = pages._replace(
        exact_keys=move(pages.exact_keys),
        exact_values=move(pages.exact_values),
        keys=Codes(*map(move, pages.keys)),
        values=Codes(*map(move, pages.values)),
    )
    old = case.blocks
    blocks = Blocks(
        pages=move(old.table),
        exact_pages=move(old.exact_table),
        starts=move(old.starts),
        counts=old.counts,
        page_size=old.page_size,
    )
    return replace(case, pages=moved, blocks=blocks, q=move(case.q))
