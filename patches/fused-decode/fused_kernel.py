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
    # Weights are at most 2^15 instead of 1: as float16 those down to 2^-29 of the largest keep all their bits.
    RAISED: tl.constexpr = 15
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
                chance = tl.exp2(
                    (score - new_peak[:, None]) * gain[:, None] + RAISED
                )
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
            weights = weights * (1.0 / (1 << RAISED))
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
