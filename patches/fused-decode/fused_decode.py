import functools
from typing import NamedTuple


# Split-KV decode attention that reads the FP8 slots itself: no workspace of the pool's size and no cast pass.
@triton.jit
def half_of_byte(byte, E5M2: tl.constexpr):
    """float16 of one FP8 byte given as an integer; e4m3 comes 2^8 times too small."""
    wide = byte.to(tl.uint16)
    if E5M2:
        return (wide << 8).to(tl.float16, bitcast=True)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return (
        tl.where((wide & 0x7F) == 0x7F, 0x7E00, half)
        .to(tl.uint16)
        .to(tl.float16, bitcast=True)
    )


@triton.jit
def half_pair(words, E5M2: tl.constexpr, CONVERT: tl.constexpr, ASM: tl.constexpr):
    """float16 of the lower and of the upper FP8 byte of int16 words, exactly, NaN included.

    An e5m2 number is the upper byte of a half float. An e4m3 number is converted in hardware (CONVERT, from SM89 on),
    or comes 2^8 times too small: its bits, one exponent bit further down, are a half float. pack=2: both words of a
    register at once.
    """
    if not ASM:
        return half_of_byte(words & 0xFF, E5M2), half_of_byte((words >> 8) & 0xFF, E5M2)
    elif E5M2:
        return tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, 0, 0x2404;
            prmt.b32 $1, $2, 0, 0x3414;
            """,
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif CONVERT:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bytes;
            .reg .b16 lower, upper;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {lower, upper}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }
            """,
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 part, nan, bad;
            and.b32 nan, $2, 0x7f7f7f7f;
            add.u32 nan, nan, 0x01010101;
            and.b32 nan, nan, 0x80808080;
            and.b32 $1, $2, 0x80008000;
            shr.u32 part, $2, 1;
            and.b32 part, part, 0x3f803f80;
            or.b32 $1, $1, part;
            and.b32 bad, nan, 0x80008000;
            shr.u32 part, bad, 5;
            sub.u32 bad, bad, part;
            or.b32 $1, $1, bad;
            shl.b32 part, $2, 8;
            and.b32 $0, part, 0x80008000;
            shr.u32 part, part, 1;
            and.b32 part, part, 0x3f803f80;
            or.b32 $0, $0, part;
            shl.b32 bad, nan, 8;
            and.b32 bad, bad, 0x80008000;
            shr.u32 part, bad, 5;
            sub.u32 bad, bad, part;
            or.b32 $0, $0, bad;
            }
            """,
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def float_pair(words, HALF: tl.constexpr):
    """float32 of the lower and of the upper bfloat16 (HALF: float16) number of int32 words."""
    if HALF:
        lower = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        upper = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return lower, upper
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(
        tl.float32, bitcast=True
    )


@triton.jit
def scaled_pair(words, up, HALF: tl.constexpr, ASM: tl.constexpr):
    """float16 of up times the lower and times the upper bfloat16 (HALF: float16) number of int32 words."""
    if HALF or not ASM:
        even, odd = float_pair(words, HALF)
        return (even * up).to(tl.float16), (odd * up).to(tl.float16)
    # The compiler moves a change of layout in front of inline assembly: one for the words instead of two for
    # their float32 halves.
    up = tl.broadcast_to(up, words.shape)
    even = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 bits;
        .reg .f32 first, second;
        shl.b32 bits, $1, 16;
        mov.b32 first, bits;
        mul.f32 first, first, $3;
        shl.b32 bits, $2, 16;
        mov.b32 second, bits;
        mul.f32 second, second, $4;
        cvt.rn.f16x2.f32 $0, second, first;
        }
        """,
        "=&r,r,r,r,r",
        [words, up],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )
    odd = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 bits;
        .reg .f32 first, second;
        and.b32 bits, $1, 0xffff0000;
        mov.b32 first, bits;
        mul.f32 first, first, $3;
        and.b32 bits, $2, 0xffff0000;
        mov.b32 second, bits;
        mul.f32 second, second, $4;
        cvt.rn.f16x2.f32 $0, second, first;
        }
        """,
        "=&r,r,r,r,r",
        [words, up],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )
    return even, odd


@triton.jit
def repeated(query, ROWS: tl.constexpr):
    """[warps, heads, columns] as [warps, ROWS, columns], the heads again and again."""
    if query.shape[1] == ROWS:
        return query
    many = tl.broadcast_to(
        query[:, None, :, :],
        (query.shape[0], ROWS // query.shape[1], query.shape[1], query.shape[2]),
    )
    return tl.reshape(many, (query.shape[0], ROWS, query.shape[2]))


@triton.jit
def prefetch(address):
    """Start to bring the lines of these addresses to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for_kernel_before(number):
    """number, once the kernels before this one are done and what they wrote is visible (an overlapped launch does not
    wait). What number is made of is computed before that."""
    return tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;",
        "=r,r,~{memory}",
        [number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def let_next_kernel_start():
    """The next kernel of the stream may start, if its launch is an overlapped one."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def power_of_two(exponent):
    """2.0 ** (exponent - 127) as float32, 0.0 for exponent 0."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def shares(total, programs, TILE: tl.constexpr):
    """How all the batch's tokens are shared out in whole tiles: (least tiles of a program, programs with one more)."""
    tiles = tl.maximum(tl.cdiv(total, TILE), 1)
    # No more programs than the longest share makes necessary: fewer pieces.
    used = tl.cdiv(tiles, tl.cdiv(tiles, programs))
    return tiles // used, tiles % used


@triton.jit
def first_token(program, least, longer, TILE: tl.constexpr):
    """Where the share of a program begins; the batch's end or later if it has none."""
    return (program * least + tl.minimum(program, longer)) * TILE


@triton.jit
def program_of(token, least, longer, TILE: tl.constexpr):
    """The program whose share has this token."""
    tile = token // TILE
    after = tile - longer * (least + 1)
    return tl.where(
        after < 0, tile // (least + 1), longer + after // tl.maximum(least, 1)
    )


@triton.jit(do_not_specialize=["num_requests", "max_tokens", "num_heads"])
def fused_decode_kernel(
    query,
    query_rope,
    pool,
    pool_rope,
    kv_indices,
    kv_indptr,
    part,
    part_sums,
    out,
    out_lse,
    num_requests,
    max_tokens,
    num_heads,
    scale,
    query_stride,
    query_head_stride,
    rope_stride,
    rope_head_stride,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    HEADS: tl.constexpr,
    REQUESTS: tl.constexpr,
    WIDE: tl.constexpr,
    E5M2: tl.constexpr,
    HALF: tl.constexpr,
    CONVERT: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attention of HEADS heads over one program's share of all the batch's tokens, request by request.

    The tokens of all requests, kv_indptr[num_requests] of them, are shared out evenly over the programs of axis 0, so
    that the grid is fixed and a captured graph replays any lengths. A request that one program has whole goes to out,
    a piece of a request to part for fused_decode_combine: row 2 * program if it is not the request's first, else
    2 * program + 1 (a program has at most one of each).

    pool, pool_rope: rows of 256 latent and 32 rope int16 words (two FP8 numbers a word), ROW words apart. Every warp has
    its own 1 / WARPS of the columns, for the score (partial sums over the warps) and for the value alike: a batched
    product keeps them apart, so that no warp holds a copy of the query and each tile crosses shared memory once, as
    FP8. query, query_rope: two numbers an int32 word. Per head the query is scaled by a power of two into the range of
    float16.
    """
    COLUMNS: tl.constexpr = 256 // WARPS
    # A product has at least 16 rows. Four warps hold the query in registers, its heads twice; two have no registers
    # left for it, so that it waits in shared memory, with rows of zeros. The two halves of the scores are added.
    ROWS: tl.constexpr = 16 if HEADS < 16 else HEADS
    PREPARED: tl.constexpr = HEADS if WARPS > 2 else ROWS
    LOG2_E: tl.constexpr = 1.4426950408889634
    LARGEST: tl.constexpr = 3e38
    # Powers of two: what the conversion of the pool's numbers left out, and what repeated heads bring twice.
    VALUE_GAIN: tl.constexpr = 1.0 if E5M2 or (ASM and CONVERT) else 256.0
    SCORE_GAIN: tl.constexpr = VALUE_GAIN * PREPARED / ROWS
    program = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row_of_heads = tl.arange(0, PREPARED)
    head_row = tl.program_id(1) * HEADS + row_of_heads
    request_ids = tl.arange(0, REQUESTS)
    ends = tl.load(
        kv_indptr + 1 + request_ids,
        mask=request_ids < num_requests,
        other=2147483647,
    )
    total = tl.minimum(tl.load(kv_indptr + num_requests), max_tokens)
    least, longer = shares(total, tl.num_programs(0), TILE)
    begin = first_token(program, least, longer, TILE)
    end = tl.minimum(first_token(program + 1, least, longer, TILE), total)
    request = tl.sum((ends <= begin).to(tl.int32), 0)
    tile = tl.arange(0, TILE)
    if OVERLAP:
        # kv_indptr and kv_indices are the plan's, from long before the kernel that this one overlaps. Rows are not:
        # those of new tokens may still be on their way, and are only brought nearer.
        if WARPS > 2:
            if begin < end:
                soon = tl.load(kv_indices + tl.minimum(begin + tile, end - 1))
                if WIDE:
                    soon = soon.to(tl.int64)
                line = tl.minimum(tl.arange(0, 16), 8) * 32  # of 64 bytes, 9 a row
                prefetch((pool + soon * ROW)[:, None] + line[None, :])
        begin = wait_for_kernel_before(begin)
        # All programs fit at once, so the second kernel takes no place from them.
        let_next_kernel_start()

    warp = tl.arange(0, WARPS)[:, None, None]
    column = warp * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    column_t = warp * COLUMNS + tl.arange(0, COLUMNS)[None, :, None]
    # 32 words of rope: 16 for each of two warps (16 is the least that a product takes).
    rope = warp * 16 + tl.arange(0, 16)[None, None, :]
    rope_t = warp * 16 + tl.arange(0, 16)[None, :, None]
    while begin < end:
        if REQUESTS <= 32:  # a register a lane; more would spill
            first = tl.max(tl.where(request_ids < request, ends, 0), 0)
            last = tl.min(tl.where(request_ids == request, ends, 2147483647), 0)
        else:
            first = tl.load(kv_indptr + request)
            last = tl.load(kv_indptr + request + 1)
        last = tl.minimum(last, total)
        stop = tl.minimum(end, last)
        if begin < stop:
            # Past the end the last token again: a real row, its weight is 0.
            next_slot = tl.load(kv_indices + tl.minimum(begin + tile, stop - 1))
            has_head = (head_row < num_heads) & (row_of_heads < HEADS)
            has_head = has_head[None, :, None]
            words = tl.load(
                query
                + request.to(tl.int64) * query_stride
                + head_row[None, :, None] * query_head_stride
                + column,
                mask=has_head,
                other=0,
            )
            rope_words = tl.load(
                query_rope
                + request.to(tl.int64) * rope_stride
                + head_row[None, :, None] * rope_head_stride
                + rope,
                mask=has_head & (warp < 2),
                other=0,
            )
            even, odd = float_pair(words, HALF)
            rope_even, rope_odd = float_pair(rope_words, HALF)
            largest = tl.maximum(
                tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 2),
                tl.max(tl.maximum(tl.abs(rope_even), tl.abs(rope_odd)), 2),
            )
            largest = tl.max(largest, 0).to(tl.int32, bitcast=True)
            # To [2^14, 2^15): 268 = 127 + 127 + 14.
            exponent = tl.minimum(268 - (largest >> 23), 254)
            up = power_of_two(exponent)[None, :, None]
            even, odd = scaled_pair(words, up, HALF, ASM and WARPS > 2)
            rope_even, rope_odd = scaled_pair(rope_words, up, HALF, ASM and WARPS > 2)
            even, odd = repeated(even, ROWS), repeated(odd, ROWS)
            rope_even = repeated(rope_even, ROWS)
            rope_odd = repeated(rope_odd, ROWS)
            exponent = tl.min(tl.reshape(exponent, (PREPARED // HEADS, HEADS)), 0)
            # Never 0 nor infinite: times the -inf of masked tokens or the 0 of the peak those are NaN.
            gain = power_of_two(254 - exponent) * (scale * (LOG2_E * SCORE_GAIN))
            gain = tl.minimum(tl.maximum(gain, 1e-37), LARGEST)

            peak = tl.full((HEADS,), -LARGEST, tl.float32)
            weight = tl.zeros((HEADS, TILE), tl.float32)
            value_even = tl.zeros((WARPS, COLUMNS, HEADS), tl.float32)
            value_odd = tl.zeros((WARPS, COLUMNS, HEADS), tl.float32)
            for start in range(begin, stop, TILE):
                slot = next_slot
                token = start + tile
                next_slot = tl.load(kv_indices + tl.minimum(token + TILE, stop - 1))
                if WIDE:
                    slot = slot.to(tl.int64)
                row = slot[None, None, :] * ROW
                latent = tl.load(pool + (row + column_t))
                latent_rope = tl.load(
                    pool_rope + (row + rope_t), mask=warp < 2, other=0
                )
                key_even, key_odd = half_pair(latent_rope, E5M2, CONVERT, ASM)
                score = tl.dot(rope_even, key_even)
                score = tl.dot(rope_odd, key_odd, acc=score)
                key_even, key_odd = half_pair(latent, E5M2, CONVERT, ASM)
                score = tl.dot(even, key_even, acc=score)
                score = tl.dot(odd, key_odd, acc=score)
                score = tl.reshape(score, (WARPS, ROWS // HEADS, HEADS, TILE))
                score = tl.sum(tl.sum(score, 1), 0)
                score = tl.where((token < stop)[None, :], score, -float("inf"))
                new_peak = tl.maximum(peak, tl.max(score, 1))
                fade = tl.exp2((peak - new_peak) * gain)
                chance = tl.exp2((score - new_peak[:, None]) * gain[:, None])
                peak = new_peak
                weight = weight * fade[:, None] + chance
                chance = tl.broadcast_to(
                    tl.trans(chance.to(tl.float16))[None, :, :], (WARPS, TILE, HEADS)
                )
                value_even = tl.dot(
                    key_even, chance, acc=value_even * fade[None, None, :]
                )
                value_odd = tl.dot(key_odd, chance, acc=value_odd * fade[None, None, :])

            weights = tl.sum(weight, 1)
            value = (
                tl.reshape(
                    tl.join(
                        tl.permute(value_even, (0, 2, 1)),
                        tl.permute(value_odd, (0, 2, 1)),
                    ),
                    (WARPS, HEADS, 2 * COLUMNS),
                )
                * (VALUE_GAIN / weights)[None, :, None]
            )
            target = (
                head[None, :, None] * 512
                + warp * (2 * COLUMNS)
                + tl.arange(0, 2 * COLUMNS)[None, None, :]
            )
            has_head = (head < num_heads)[None, :, None]
            if (begin == first) & (stop == last):
                tl.store(
                    out + request.to(tl.int64) * (num_heads * 512) + target,
                    value.to(out.dtype.element_ty),
                    mask=has_head,
                )
                if out_lse is not None:
                    tl.store(
                        out_lse + request * num_heads + head,
                        peak * gain + tl.log2(weights),
                        mask=head < num_heads,
                    )
            else:
                piece = 2 * program + (begin == first).to(tl.int32)
                tl.store(
                    part + piece.to(tl.int64) * (num_heads * 512) + target,
                    value.to(part.dtype.element_ty),
                    mask=has_head,
                )
                # Not a log-sum-exp: beyond 2^23 that has no place left for the weights.
                sums = part_sums + (piece * num_heads + head) * 3
                tl.store(sums, peak, mask=head < num_heads)
                tl.store(sums + 1, weights, mask=head < num_heads)
                tl.store(sums + 2, gain, mask=head < num_heads)
            begin = stop
        request += 1


@triton.jit
def combined(
    part,
    part_sums,
    program,
    pieces,
    head,
    num_heads,
    column,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The columns of all pieces of a request, from program on, PIECES at once: (values, log-sum-exp)."""
    peak = -3e38
    weights = 0.0
    value = tl.zeros((PIECES, BLOCK), tl.float32)
    gain = 0.0
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        row = 2 * (program + piece) + (piece == 0).to(tl.int32)
        row = row * num_heads + head
        place = (row * 512)[:, None] + column[None, :]
        zero = 0
        if OVERLAP:
            # Known only then, so that the places are computed before it.
            zero = tl.multiple_of(wait_for_kernel_before(start) - start, 128)
            # Not earlier: the next kernel may have the memory of what the first one reads.
            let_next_kernel_start()
        # The same for all pieces.
        gain = tl.load(part_sums + ((2 * program + 1) * num_heads + head) * 3 + 2)
        some_value = tl.load(
            part + zero + place,
            mask=(piece < pieces)[:, None],
            other=0.0,
        )
        some_peak = tl.load(part_sums + row * 3, mask=piece < pieces, other=-3e38)
        some_weight = tl.load(part_sums + row * 3 + 1, mask=piece < pieces, other=0.0)
        new_peak = tl.maximum(peak, tl.max(some_peak, 0))
        fade = tl.exp2((peak - new_peak) * gain)
        chance = tl.exp2((some_peak - new_peak) * gain) * some_weight
        peak = new_peak
        weights = weights * fade + tl.sum(chance, 0)
        value = value * fade + chance[:, None] * some_value.to(tl.float32)
    return tl.sum(value, 0) / weights, peak * gain + tl.log2(weights)


@triton.jit(do_not_specialize=["num_requests", "max_tokens", "num_heads", "programs"])
def fused_decode_combine(
    part,
    part_sums,
    kv_indptr,
    out,
    out_lse,
    num_requests,
    max_tokens,
    num_heads,
    programs,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK columns of out[request, head] if several programs shared the request, PIECES at once; zeros for a request
    without tokens. Programs: (requests, heads, 512 / BLOCK)."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    # Few columns a lane, so that a warp has whole rows and sums in its registers.
    column = tl.max_contiguous(column, BLOCK // 32 if BLOCK > 32 else 8)
    # Written before fused_decode_kernel began, which this kernel may still overlap.
    total = tl.minimum(tl.load(kv_indptr + num_requests), max_tokens)
    first = tl.load(kv_indptr + request)
    last = tl.minimum(tl.load(kv_indptr + request + 1), total)
    least, longer = shares(total, programs, TILE)
    row_out = request * num_heads + head
    place = out + row_out.to(tl.int64) * 512 + column
    program = program_of(first, least, longer, TILE)
    pieces = program_of(last - 1, least, longer, TILE) - program + 1
    if first >= last:
        if OVERLAP:
            wait_for_kernel_before(program)
        tl.store(place, tl.zeros((BLOCK,), out.dtype.element_ty))
        if out_lse is not None:
            tl.store(out_lse + row_out, -float("inf"))
    elif pieces > 1:
        if pieces > FEW:
            value, lse = combined(
                part,
                part_sums,
                program,
                pieces,
                head,
                num_heads,
                column,
                PIECES,
                BLOCK,
                OVERLAP,
            )
        else:
            value, lse = combined(
                part,
                part_sums,
                program,
                pieces,
                head,
                num_heads,
                column,
                FEW,
                BLOCK,
                OVERLAP,
            )
        tl.store(place, value.to(out.dtype.element_ty))
        if out_lse is not None:
            tl.store(out_lse + row_out, lse)
    else:
        # Not for the sake of what it reads: this kernel's end is to say that the first one has ended too.
        if OVERLAP:
            wait_for_kernel_before(pieces)


class FusedTuning(NamedTuple):
    """How fused_decode_kernel is built and launched."""

    tile: int  # tokens a step
    warps: int
    stages: int  # steps loaded ahead, plus one
    programs: int  # a multiprocessor
    overlap: bool = False  # launch while the kernel before still runs (SM90 and newer)


fused_triton = tuple(map(int, triton.__version__.split(".")[:2]))


def fused_shared_memory(device):
    """The bytes of shared memory that a block can have: 99 KB on SM86, SM89, SM120; 227 KB on SM90, SM100."""
    index = torch.device(device).index
    if index is None:
        index = torch.cuda.current_device()
    driver = triton.runtime.driver.active.utils
    return driver.get_device_properties(index)["max_shared_mem"]


def fused_unfit(pool, dtype, layer, backend, wrapper):
    """Why fused_attention does not apply to this layer, or '' (checked at every call, host only)."""
    if wrapper._page_size != 1:
        return f"the plan has pages of {wrapper._page_size} slots"
    if (layer.v_head_dim, layer.head_dim) != (512, 576):
        return f"rows of {layer.v_head_dim} + {layer.head_dim - layer.v_head_dim} values, not 512 + 64"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"a query of {dtype}"
    if layer.tp_q_head_num > 128:
        return f"{layer.tp_q_head_num} heads"
    if not wrapper._sm_scale > 0:
        return f"a softmax scale of {wrapper._sm_scale}"
    if backend.skip_prefill and wrapper._use_cuda_graph:
        return "a replayed draft step reads fewer tokens than its kv_indptr says"
    return fused_unfit_device(pool.device)


@functools.lru_cache(maxsize=None)
def fused_unfit_device(device):
    """Why this device cannot run fused_decode_kernel, or ''."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return "an AMD GPU"
    if fused_triton < (3, 3):
        return f"Triton {triton.__version__}, whose compiler ends the process"
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return f"compute capability {properties.major}.{properties.minor}"
    shared = fused_shared_memory(device)
    return "" if shared >= 99 * 1024 else f"{shared} bytes of shared memory a block"


@functools.lru_cache(maxsize=None)
def fused_tuning(device, block, few):
    """The tuning for a GPU, a Triton and blocks of 8 or 16 heads; few: too few requests for two warps to pay."""
    small = fused_shared_memory(device) < 160 * 1024
    if fused_triton < (3, 5):  # spills where registers are few
        return FusedTuning(tile=16 if small else 32, warps=4, stages=3, programs=2)
    overlap = torch.cuda.get_device_capability(device) >= (9, 0)
    if few or small or block > 8:  # a tile sooner, fewer pieces
        # Two programs of 44 KB fit into 99 KB; 16 heads take 68 KB, or 44 KB with tiles of 16 tokens.
        tile = 16 if small and block > 8 else 32
        return FusedTuning(tile, warps=4, stages=3, programs=2, overlap=overlap)
    return FusedTuning(tile=32, warps=2, stages=2, programs=4, overlap=overlap)


# The partial results of the splits, of all layers: their size depends on the GPU alone. Captured graphs keep the
# address.
fused_parts = {}


def fused_part(device, heads, rows):
    """float16 [rows, heads, 512], the values of the pieces, and float32 [rows, heads, 3]: peak, sum of weights, gain."""
    key = (device, heads, rows)
    if key not in fused_parts:
        part = torch.empty((rows, heads, 512), dtype=torch.float16, device=device)
        part_sums = torch.empty((rows, heads, 3), dtype=torch.float32, device=device)
        fused_parts[key] = (part, part_sums)
        _mlapatch_logger.info(
            "mlapatch: %d bytes for the partial results of fused-decode, shared by all layers",
            part.numel() * 2 + part_sums.numel() * 4,
        )
    return fused_parts[key]


def fused_attention(
    query,
    query_rope,
    latent,
    latent_rope,
    kv_indices,
    kv_indptr,
    num_requests,
    scale,
    out,
    tuning=None,
    with_lse=True,
):
    """Decode attention over FP8 slots into out [requests, heads, 512]; the base-2 log-sum-exp [requests, heads] or None.

    query: [requests, heads, 512], query_rope: [requests, heads, 64], bfloat16 or float16; latent: [slots, 1, 512],
    latent_rope: [slots, 1, 64], e4m3 or e5m2, parts of the same rows, of which only the slots
    kv_indices[:kv_indptr[num_requests]] are read. Rows of out from num_requests on are left alone. Every size is fixed
    by the shapes: no wait for the device.
    """
    heads = query.shape[1]
    out_lse = None
    if with_lse:
        shape = (query.shape[0], heads)
        out_lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    if num_requests == 0:
        return out_lse
    device = latent.device
    interpreted = device.type != "cuda"
    # Triton before 3.5 wants 16 columns of a product.
    block = 8 if heads <= 8 and fused_triton >= (3, 5) else 16
    blocks = -(-heads // block)
    if interpreted:
        tuning = tuning or FusedTuning(tile=16, warps=4, stages=1, programs=2)
        processors, capability = 2, (0, 0)
    else:
        tuning = tuning or fused_tuning(device, block, num_requests < 16)
        properties = torch.cuda.get_device_properties(device)
        processors = properties.multi_processor_count
        capability = (properties.major, properties.minor)
    # Triton's interpreter cuts bfloat16 off where a GPU rounds.
    target = torch.empty(out.shape, device=device) if interpreted else out
    programs = max(1, processors * tuning.programs // blocks)
    part, part_sums = fused_part(device, heads, 2 * programs)
    words = query.view(torch.int32)
    rope_words = query_rope.view(torch.int32)
    latent_words = latent.view(torch.int16)
    row = latent_words.stride(0)
    # The pieces of a request that a batch of equal lengths gives, in one step or few; 64 of their values a thread.
    pieces = min(1 << (programs // num_requests + 1).bit_length(), 256)
    columns = 32 if num_requests == 1 else 64 if pieces > 16 else 128
    fused_decode_kernel[(programs, blocks)](
        words,
        rope_words,
        latent_words,
        latent_rope.view(torch.int16),
        kv_indices,
        kv_indptr,
        part,
        part_sums,
        target,
        out_lse,
        num_requests,
        kv_indices.numel(),
        heads,
        scale,
        words.stride(0),
        words.stride(1),
        rope_words.stride(0),
        rope_words.stride(1),
        ROW=row,
        TILE=tuning.tile,
        WARPS=tuning.warps,
        HEADS=block,
        REQUESTS=max(32, 1 << (num_requests - 1).bit_length()),
        WIDE=latent.shape[0] * row >= 2**31,
        E5M2=latent.dtype == torch.float8_e5m2,
        HALF=query.dtype == torch.float16,
        CONVERT=capability >= (8, 9),
        ASM=not interpreted,
        OVERLAP=tuning.overlap,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        **({"launch_pdl": True} if tuning.overlap else {}),
    )
    fused_decode_combine[(num_requests, heads, 512 // columns)](
        part,
        part_sums,
        kv_indptr,
        target,
        out_lse,
        num_requests,
        kv_indices.numel(),
        heads,
        programs,
        TILE=tuning.tile,
        PIECES=pieces,
        FEW=min(pieces, 32),
        BLOCK=columns,
        OVERLAP=tuning.overlap,
        num_warps=max(1, min(pieces * columns // 2048, 8)),
        **({"launch_pdl": True} if tuning.overlap else {}),
    )
    if interpreted:
        out[:num_requests].copy_(target[:num_requests])
    return out_lse


_fused_unfits_logged = set()


def fused_decode_pool(pool, dtype, layer, backend, wrapper):
    """The layer's KV pool for fused_decode_run: as it is where the kernel reads it, else cast as active-cast does."""
    if pool.dtype == dtype:
        return pool
    if not stock_cast_needed(backend, wrapper, pool, layer):
        reason = fused_unfit(pool, dtype, layer, backend, wrapper)
        if not reason:
            return pool
        if reason not in _fused_unfits_logged:
            _fused_unfits_logged.add(reason)
            _mlapatch_logger.warning(
                "mlapatch: fused-decode casts the active slots, as active-cast does: %s",
                reason,
            )
    return active_cast(pool, dtype, layer, backend, wrapper, decode=True)


def fused_decode_run(
    wrapper,
    backend,
    q_nope,
    q_pe,
    ckv_cache,
    kpe_cache,
    out=None,
    return_lse=False,
    **options,
):
    """wrapper.run on what fused_decode_pool returned: fused_attention where that is the FP8 pool."""
    if ckv_cache.dtype == q_nope.dtype:
        return wrapper.run(
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            out=out,
            return_lse=return_lse,
            **options,
        )
    if out is None or not out.is_contiguous():
        out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
    lse = fused_attention(
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        wrapper._kv_indices_buf,
        live_kv_indptr(backend, wrapper, decode=True),
        wrapper._kv_indptr_buf.numel() - 1,
        wrapper._sm_scale,
        out,
        with_lse=return_lse,
    )
    return (out, lse) if return_lse else out
