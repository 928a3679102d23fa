"""PTX of the loop over the columns of a weight in words, for a few tokens; see `triton.packed_few`.

Words, their scales and tokens are copied to rings in shared memory, some stages of a few chunks ahead; the
first words before the previous kernel has ended. A warp adds a chunk of 64 columns, widens the next one, and
loads the words of the one after, all at once: no product waits for a load.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from blockdraft.kernels.packed_speeds import Code
from blockdraft.kernels.triton.packed_asm import widening

SHARED = 48 * 1024  # bytes of shared memory that a kernel has without asking for more
THREADS = 128
CHUNKS = 2  # of a stage
TILES = 4  # of a program: one for each warp
_NAMES = ("x", "words", "scales", "pieces", "tokens", "chunks", "stride", "tile")


@dataclass(frozen=True, slots=True)
class Loop:
    """What the loop is made for: `num_scales` words of scales of a row for `span` chunks."""

    code: Code
    num_scales: int
    span: int
    is_half: bool
    tokens: int  # 8 or 16
    has_pdl: bool

    @property
    def groups(self) -> int:
        """Words of scales of a row in a stage."""
        return CHUNKS * self.num_scales // self.span

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of a stage: tokens, words, scales."""
        return 128 * self.tokens * CHUNKS, 512 * CHUNKS * TILES, 64 * self.groups * TILES

    @property
    def ahead(self) -> int:
        """Stages on their way. One slot more holds the stage that is read."""
        return SHARED // sum(self.sizes) - 1

    @property
    def places(self) -> tuple[int, int, int]:
        """Where the rings of words and scales begin, behind that of tokens, and where they end."""
        tokens, words, scales = self.sizes
        slots = self.ahead + 1
        return slots * tokens, slots * (tokens + words), slots * (tokens + words + scales)

    @property
    def num_sums(self) -> int:
        """Sums of a thread: for rows g and g + 8 of a warp, of tokens 8 i + 2 t and one more."""
        return self.tokens // 2

    @property
    def is_possible(self) -> bool:
        """Return whether a stage has whole groups, and threads enough to copy their scales."""
        return self.span <= CHUNKS and 4 * TILES * self.groups <= THREADS


@functools.cache
def assembly(loop: Loop) -> tuple[str, str]:
    """Return the loop and its constraints: a thread's sums, then `_NAMES`, then a number that is not read.

    Those are the addresses of tokens, words, scales and pieces, how many tokens and chunks there are, the
    elements of a row of tokens, and the first tile.
    """
    given = {name: f"${loop.num_sums + i}" for i, name in enumerate(_NAMES)}
    lines = [*_declare(loop, given), *_begin(loop, given), *_body(loop)]
    lines += [f"mov.b32 ${i}, sum{i};" for i in range(loop.num_sums)]
    return "\n".join(["{", *lines, "}"]), ",".join(["=f"] * loop.num_sums + ["l"] * 4 + ["r"] * 5)


def _declare(loop: Loop, given: dict[str, str]) -> Iterator[str]:
    yield f".shared .align 1024 .b8 ring[{loop.places[2]}];"
    yield ".reg .pred more, is_scale, again, one;"
    yield ".reg .b32 thread, lane, warp, base, step, stages, slot, before, part, other, from, to;"
    yield ".reg .b32 word_to, scale_to, token_to<2>, has<2>, word_from, scale_from, token_from<2>;"
    yield ".reg .b32 word_at<2>, scale_at<2>, token_at<4>;"
    yield ".reg .b64 wide, scale, x<2>, word<2>;"
    yield f".reg .b32 a<32>, stored<8>, factor<16>, piece<2>, b<{2 * loop.tokens}>;"
    yield f".reg .f32 sum<{loop.num_sums}>;"
    yield "mov.u32 thread, %tid.x;"
    yield "and.b32 lane, thread, 31;"
    yield "shr.u32 warp, thread, 5;"
    yield "mov.u32 base, ring;"
    yield f"mov.b32 stages, {given['chunks']};"


def _begin(loop: Loop, given: dict[str, str]) -> Iterator[str]:
    for j in range(loop.tokens * CHUNKS // 16):
        yield from _token(loop, given, j)
    for j in range(TILES * CHUNKS // 4):
        yield from _word(loop, given, j)
    yield from _scale(loop, given)
    yield from _lane(loop, given)
    yield f"shr.u32 stages, stages, {CHUNKS.bit_length() - 1};"
    yield from (f"mov.f32 sum{i}, 0f00000000;" for i in range(loop.num_sums))
    for i in range(loop.ahead):
        yield f"setp.gt.s32 more, stages, {i};"
        yield from _copy_words(loop, str(i))
    if loop.has_pdl:
        yield "griddepcontrol.wait;"
    for i in range(loop.ahead):
        yield f"setp.gt.s32 more, stages, {i};"
        yield from _copy_tokens(loop, str(i))
        yield "cp.async.commit_group;"


def _token(loop: Loop, given: dict[str, str], j: int) -> Iterator[str]:
    """Find 16 bytes of a token that a thread copies; zeros for tokens that are not there."""
    each = 8 * CHUNKS  # of a token in a stage
    yield f"shr.u32 part, thread, {each.bit_length() - 1};"
    yield f"add.u32 part, part, {THREADS // each * j};"
    yield f"and.b32 other, thread, {each - 1};"
    yield f"setp.lt.s32 one, part, {given['tokens']};"
    yield f"selp.b32 has{j}, 16, 0, one;"
    yield "selp.b32 from, part, 0, one;"
    yield f"mul.wide.s32 wide, from, {given['stride']};"
    yield "shl.b64 wide, wide, 1;"
    yield f"add.u64 x{j}, {given['x']}, wide;"
    yield "mul.wide.u32 wide, other, 16;"
    yield f"add.u64 x{j}, x{j}, wide;"
    # A chunk's 128 bytes of a token are swizzled, as the tensor cores read them.
    yield "xor.b32 to, other, part;"
    yield "and.b32 to, to, 7;"
    yield "shl.b32 to, to, 4;"
    yield "mad.lo.u32 to, part, 128, to;"
    yield "shr.u32 other, other, 3;"
    yield f"mad.lo.u32 to, other, {128 * loop.tokens}, to;"
    yield f"add.u32 token_to{j}, to, base;"


def _word(loop: Loop, given: dict[str, str], j: int) -> Iterator[str]:
    """Find 16 bytes of words that a thread copies."""
    each = 32 * CHUNKS  # of a tile in a stage
    yield f"add.u32 to, thread, {THREADS * j};"
    yield f"shr.u32 part, to, {each.bit_length() - 1};"
    yield f"and.b32 other, to, {each - 1};"
    yield f"add.u32 part, part, {given['tile']};"
    yield "mul.lo.u32 part, part, stages;"
    yield "mul.wide.u32 wide, part, 512;"
    yield f"add.u64 word{j}, {given['words']}, wide;"
    yield "mul.wide.u32 wide, other, 16;"
    yield f"add.u64 word{j}, word{j}, wide;"


def _scale(loop: Loop, given: dict[str, str]) -> Iterator[str]:
    """Find 16 bytes of scales that a thread copies, and where it puts them and words."""
    each = 4 * loop.groups  # of a tile in a stage
    yield f"setp.lt.u32 is_scale, thread, {TILES * each};"
    yield f"shr.u32 part, thread, {each.bit_length() - 1};"
    yield f"and.b32 other, thread, {each - 1};"
    yield "selp.b32 part, part, 0, is_scale;"
    yield f"add.u32 part, part, {given['tile']};"
    yield f"mul.lo.u32 from, stages, {loop.num_scales};"
    yield f"shr.u32 from, from, {loop.span.bit_length() - 1};"
    yield "mul.lo.u32 part, part, from;"
    yield "mul.wide.u32 wide, part, 64;"
    yield f"add.u64 scale, {given['scales']}, wide;"
    yield "mul.wide.u32 wide, other, 16;"
    yield "add.u64 scale, scale, wide;"
    yield "mad.lo.u32 to, thread, 16, base;"
    yield f"add.u32 word_to, to, {loop.places[0]};"
    yield f"add.u32 scale_to, to, {loop.places[1]};"


def _lane(loop: Loop, given: dict[str, str]) -> Iterator[str]:
    """Find the words and scales that a lane widens, and load the pieces of its rows' second factors."""
    yield "shr.u32 other, lane, 2;"
    yield f"add.u32 word_from, base, {loop.places[0]};"
    yield f"mad.lo.u32 word_from, warp, {512 * CHUNKS}, word_from;"
    yield "mad.lo.u32 word_from, lane, 16, word_from;"
    yield f"add.u32 scale_from, base, {loop.places[1]};"
    yield f"mad.lo.u32 scale_from, warp, {64 * loop.groups}, scale_from;"
    yield "mad.lo.u32 scale_from, other, 8, scale_from;"
    # Lane l has the address of eight columns (l / 8) of a token (l % 8), of the first half of a chunk.
    yield "and.b32 other, lane, 7;"
    yield "shr.u32 from, lane, 3;"
    yield "xor.b32 from, from, other;"
    yield "mad.lo.u32 token_from0, other, 128, base;"
    yield "mad.lo.u32 token_from0, from, 16, token_from0;"
    yield "xor.b32 token_from1, token_from0, 64;"
    if loop.code != "nvfp4":
        return
    yield "shr.u32 other, lane, 2;"
    yield f"add.u32 part, warp, {given['tile']};"
    yield "shl.b32 from, part, 4;"
    yield "mad.lo.u32 from, other, 2, from;"
    yield "mul.wide.u32 wide, from, 4;"
    yield f"add.u64 wide, {given['pieces']}, wide;"
    yield "ld.global.b32 piece0, [wide];"
    yield "ld.global.b32 piece1, [wide+4];"


def _copy_words(loop: Loop, slot: str) -> Iterator[str]:
    """Copy the next stage's words and scales to a slot, if there are `more`."""
    _, words, scales = loop.sizes
    yield f"mad.lo.u32 to, {slot}, {words}, word_to;"
    for j in range(TILES * CHUNKS // 4):
        yield f"@more cp.async.cg.shared.global [to+{16 * THREADS * j}], [word{j}], 16;"
        yield f"add.u64 word{j}, word{j}, {512 * CHUNKS};"
    yield f"mad.lo.u32 to, {slot}, {scales}, scale_to;"
    yield "and.pred one, more, is_scale;"
    yield "@one cp.async.cg.shared.global [to], [scale], 16;"
    yield f"add.u64 scale, scale, {64 * loop.groups};"


def _copy_tokens(loop: Loop, slot: str) -> Iterator[str]:
    for j in range(loop.tokens * CHUNKS // 16):
        yield f"mad.lo.u32 to, {slot}, {loop.sizes[0]}, token_to{j};"
        yield f"@more cp.async.cg.shared.global [to], [x{j}], 16, has{j};"
        yield f"add.u64 x{j}, x{j}, {128 * CHUNKS};"


def _arrive(pending: int) -> Iterator[str]:
    """Wait until the copies of all threads but the last `pending` stages are visible."""
    yield f"cp.async.wait_group {pending};"
    yield "bar.sync 0;"


def _body(loop: Loop) -> Iterator[str]:
    """Add the stages: at chunk c, tokens of c + 1 and words of c + 2 are loaded, and c + 1 is widened."""
    yield "mov.b32 step, 0;"
    yield "mov.b32 slot, 0;"
    yield f"mov.b32 before, {loop.ahead};"
    yield from _arrive(loop.ahead - 1)
    yield from _at(loop, 0)
    yield from _load_words(loop, 0)
    yield from _load_words(loop, 1)
    yield from _load_tokens(loop, 0)
    yield from _widen(loop, 0)
    yield "columns:"
    yield from _arrive(loop.ahead - 2)
    yield f"add.u32 part, step, {loop.ahead};"
    yield "setp.lt.s32 more, part, stages;"
    yield from _copy_words(loop, "before")
    yield from _copy_tokens(loop, "before")
    yield "cp.async.commit_group;"
    yield "mov.b32 before, slot;"
    yield "add.u32 slot, slot, 1;"
    yield f"setp.eq.u32 one, slot, {loop.ahead + 1};"
    yield "selp.b32 slot, 0, slot, one;"
    yield from _at(loop, 1)
    for u in range(CHUNKS):
        yield from _load_tokens(loop, u + 1)
        yield from _widen(loop, u + 1)
        yield from _load_words(loop, u + 2)
        yield from _multiply(loop, u)
    yield "mov.b32 word_at0, word_at1;"
    yield "mov.b32 scale_at0, scale_at1;"
    yield "mov.b32 token_at0, token_at2;"
    yield "mov.b32 token_at1, token_at3;"
    yield "add.u32 step, step, 1;"
    yield "setp.lt.s32 again, step, stages;"
    yield "@again bra columns;"


def _at(loop: Loop, which: int) -> Iterator[str]:
    """Find what a lane reads of the stage in `slot`: of the current stage (0), or the next one (1)."""
    tokens, words, scales = loop.sizes
    yield f"mad.lo.u32 word_at{which}, slot, {words}, word_from;"
    yield f"mad.lo.u32 scale_at{which}, slot, {scales}, scale_from;"
    for half in range(2):
        yield f"mad.lo.u32 token_at{2 * which + half}, slot, {tokens}, token_from{half};"


def _load_words(loop: Loop, chunk: int) -> Iterator[str]:
    """Load the words of a chunk of the stage, or of the next one, that a lane widens, and their scales."""
    which, u = divmod(chunk, CHUNKS)
    words = ", ".join(f"stored{4 * u + i}" for i in range(4))
    yield f"ld.shared.v4.b32 {{{words}}}, [word_at{which}+{512 * u}];"
    for i in range(loop.num_scales):
        both = ", ".join(f"factor{8 * u + 2 * i + side}" for side in range(2))
        group = u // loop.span * loop.num_scales + i
        yield f"ld.shared.v2.b32 {{{both}}}, [scale_at{which}+{64 * group}];"


def _load_tokens(loop: Loop, chunk: int) -> Iterator[str]:
    """Load a chunk of tokens as the tensor cores take them: two registers for a step and eight tokens."""
    which, u = divmod(chunk, CHUNKS)
    for i in range(loop.tokens // 8):
        for half in range(2):
            first = u * loop.tokens + 8 * i + 4 * half
            b = ", ".join(f"b{first + k}" for k in range(4))
            at = f"token_at{2 * which + half}+{128 * loop.tokens * u + 1024 * i}"
            yield f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{b}}}, [{at}];"


def _widen(loop: Loop, chunk: int) -> Iterator[str]:
    """Widen a chunk. Step j takes a[4 j …]: rows g and g + 8, columns 2 t …, then 2 t + 8 …"""
    text, _ = widening(loop.code, loop.num_scales, is_half=loop.is_half)
    u = chunk % CHUNKS
    for side in range(2):
        operands = [f"a{16 * u + 2 * place + side}" for place in range(8)]
        operands += [f"stored{4 * u + 2 * side + i}" for i in range(2)]
        for i in range(loop.num_scales):  # both words have them
            operands += 2 * [f"factor{8 * u + 2 * i + side}"]
        operands += 2 * [f"piece{side}"]
        yield functools.reduce(
            lambda done, i: done.replace(f"${i}", operands[i]), reversed(range(len(operands))), text
        )


def _multiply(loop: Loop, chunk: int) -> Iterator[str]:
    for j in range(4):
        a = ", ".join(f"a{16 * chunk + 4 * j + i}" for i in range(4))
        for i in range(loop.tokens // 8):
            sums = ", ".join(f"sum{4 * i + k}" for k in range(4))
            b = ", ".join(f"b{chunk * loop.tokens + 8 * i + 2 * j + k}" for k in range(2))
            shape = "m16n8k16.row.col.f32.bf16.bf16.f32"
            yield f"mma.sync.aligned.{shape} {{{sums}}}, {{{a}}}, {{{b}}}, {{{sums}}};"
