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
def power_of_two(exponent):
    """2.0 ** (exponent - 127) as float32, 0.0 for exponent 0."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def tokens_per_program(total, programs, TILE: tl.constexpr):
    """How many of all the batch's tokens each program takes: whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(total, programs), TILE), 1) * TILE


@triton.jit(do_not_specialize=["num_requests", "max_tokens", "num_heads", "part_rows"])
def fused_decode_kernel(
    query,
    query_rope,
    pool,
    kv_indices,
    kv_indptr,
    part,
    part_lse,
    out,
    out_lse,
    num_requests,
    max_tokens,
    num_heads,
    part_rows,
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
    a piece of a request to part (its row is the program's number plus the request's: unique, since each step to the
    next piece raises one of them) for fused_decode_combine.

    pool: rows of ROW int16 words, 288 of them used (two FP8 numbers a word: 512 latent, then 64 rope). Every warp has
    its own 1 / WARPS of the columns, for the score (partial sums over the warps) and for the value alike: a batched
    product keeps them apart, so that no warp holds a copy of the query and each tile crosses shared memory once, as
    FP8. query, query_rope: two numbers an int32 word. Per head the query is scaled by a power of two into the range of
    float16.
    """
    COLUMNS: tl.constexpr = 256 // WARPS
    LOG2_E: tl.constexpr = 1.4426950408889634
    # Powers of two that the conversion of the pool's numbers left out.
    GAIN: tl.constexpr = 1.0 if E5M2 or (ASM and CONVERT) else 256.0
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    request_ids = tl.arange(0, REQUESTS)
    ends = tl.load(
        kv_indptr + 1 + request_ids,
        mask=request_ids < num_requests,
        other=2147483647,
    )
    total = tl.minimum(tl.load(kv_indptr + num_requests), max_tokens)
    share = tokens_per_program(total, tl.num_programs(0), TILE)
    begin = program * share
    end = tl.minimum(begin + share, total)
    request = tl.sum((ends <= begin).to(tl.int32), 0)

    warp = tl.arange(0, WARPS)[:, None, None]
    column = warp * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    column_t = warp * COLUMNS + tl.arange(0, COLUMNS)[None, :, None]
    # 32 words of rope: 16 for each of two warps (16 is the least that a product takes).
    rope = warp * 16 + tl.arange(0, 16)[None, None, :]
    rope_t = warp * 16 + tl.arange(0, 16)[None, :, None]
    tile = tl.arange(0, TILE)
    while begin < end:
        first = tl.load(kv_indptr + request)
        last = tl.load(kv_indptr + request + 1)
        stop = tl.minimum(end, last)
        if begin < stop:
            has_head = (head < num_heads)[None, None, :]
            words = tl.load(
                query
                + request.to(tl.int64) * query_stride
                + head[None, None, :] * query_head_stride
                + column_t,
                mask=has_head,
                other=0,
            )
            even, odd = float_pair(words, HALF)
            words = tl.load(
                query_rope
                + request.to(tl.int64) * rope_stride
                + head[None, None, :] * rope_head_stride
                + rope_t,
                mask=has_head & (warp < 2),
                other=0,
            )
            rope_even, rope_odd = float_pair(words, HALF)
            largest = tl.maximum(
                tl.max(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1), 0),
                tl.max(tl.max(tl.maximum(tl.abs(rope_even), tl.abs(rope_odd)), 1), 0),
            )
            # To [2^14, 2^15): 268 = 127 + 127 + 14.
            exponent = tl.minimum(268 - (largest.to(tl.int32, bitcast=True) >> 23), 254)
            up = power_of_two(exponent)[None, None, :]
            even, odd = (even * up).to(tl.float16), (odd * up).to(tl.float16)
            rope_even, rope_odd = (
                (rope_even * up).to(tl.float16),
                (rope_odd * up).to(tl.float16),
            )
            # Never 0, since that times the -inf of masked tokens is NaN.
            gain = tl.maximum(
                power_of_two(254 - exponent) * (scale * (LOG2_E * GAIN)), 1e-37
            )

            peak = tl.full((HEADS,), -float("inf"), tl.float32)
            weight = tl.zeros((TILE, HEADS), tl.float32)
            value_even = tl.zeros((WARPS, HEADS, COLUMNS), tl.float32)
            value_odd = tl.zeros((WARPS, HEADS, COLUMNS), tl.float32)
            # Past the end the last token again: a real row, its weight is 0.
            next_slot = tl.load(kv_indices + tl.minimum(begin + tile, stop - 1))
            for start in range(begin, stop, TILE):
                slot = next_slot
                token = start + tile
                next_slot = tl.load(kv_indices + tl.minimum(token + TILE, stop - 1))
                if WIDE:
                    slot = slot.to(tl.int64)
                row = slot[None, :, None] * ROW
                latent = tl.load(pool + (row + column))
                latent_rope = tl.load(
                    pool + (row + (rope + 256)), mask=warp < 2, other=0
                )
                key_even, key_odd = half_pair(latent_rope, E5M2, CONVERT, ASM)
                score = tl.dot(key_even, rope_even)
                score = tl.dot(key_odd, rope_odd, acc=score)
                key_even, key_odd = half_pair(latent, E5M2, CONVERT, ASM)
                score = tl.dot(key_even, even, acc=score)
                score = tl.dot(key_odd, odd, acc=score)
                score = tl.where(
                    (token < stop)[:, None], tl.sum(score, 0), -float("inf")
                )
                new_peak = tl.maximum(peak, tl.max(score, 0) * gain)
                fade = tl.exp2(peak - new_peak)
                chance = tl.exp2(score * gain[None, :] - new_peak[None, :])
                peak = new_peak
                weight = weight * fade[None, :] + chance
                chance = tl.broadcast_to(
                    tl.trans(chance.to(tl.float16))[None, :, :], (WARPS, HEADS, TILE)
                )
                value_even = tl.dot(
                    chance, key_even, acc=value_even * fade[None, :, None]
                )
                value_odd = tl.dot(chance, key_odd, acc=value_odd * fade[None, :, None])

            weights = tl.sum(weight, 0)
            lse = peak + tl.log2(weights)
            value = (
                tl.reshape(tl.join(value_even, value_odd), (WARPS, HEADS, 2 * COLUMNS))
                * (GAIN / weights)[None, :, None]
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
                tl.store(
                    out_lse + request * num_heads + head, lse, mask=head < num_heads
                )
            else:
                piece = program + request
                tl.store(
                    part + piece.to(tl.int64) * (num_heads * 512) + target,
                    value.to(part.dtype.element_ty),
                    mask=has_head,
                )
                tl.store(
                    part_lse + head * part_rows + piece, lse, mask=head < num_heads
                )
            begin = stop
        request += 1


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "max_tokens",
        "num_heads",
        "programs",
        "part_rows",
    ]
)
def fused_decode_combine(
    part,
    part_lse,
    kv_indptr,
    out,
    out_lse,
    num_requests,
    max_tokens,
    num_heads,
    programs,
    part_rows,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[request, head] of the requests that several programs shared, BLOCK columns a program; zeros for requests
    without tokens. Programs: (requests * heads, 512 / BLOCK)."""
    request = tl.program_id(0) // num_heads
    head = tl.program_id(0) % num_heads
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    total = tl.minimum(tl.load(kv_indptr + num_requests), max_tokens)
    first = tl.load(kv_indptr + request)
    last = tl.minimum(tl.load(kv_indptr + request + 1), total)
    share = tokens_per_program(total, programs, TILE)
    place = out + tl.program_id(0).to(tl.int64) * 512 + column
    if first >= last:
        tl.store(place, tl.zeros((BLOCK,), out.dtype.element_ty))
        tl.store(out_lse + tl.program_id(0), -float("inf"))
    else:
        piece = first // share + request
        pieces = (last - 1) // share + request - piece + 1
        if pieces > 1:
            every = tl.arange(0, ALL_PIECES)
            lse_of_piece = part_lse + head * part_rows + piece
            every_lse = tl.load(
                lse_of_piece + every, mask=every < pieces, other=-float("inf")
            )
            peak = tl.max(every_lse, 0)
            weights = tl.sum(tl.exp2(every_lse - peak), 0)
            value = tl.zeros((PIECES, BLOCK), tl.float32)
            for start in range(0, pieces, PIECES):
                some = start + tl.arange(0, PIECES)
                some_lse = tl.load(
                    lse_of_piece + some, mask=some < pieces, other=-float("inf")
                )
                row = (piece + some).to(tl.int64) * num_heads + head
                some_value = tl.load(
                    part + row[:, None] * 512 + column[None, :],
                    mask=(some < pieces)[:, None],
                    other=0.0,
                )
                value += tl.exp2(some_lse - peak)[:, None] * some_value.to(tl.float32)
            tl.store(place, (tl.sum(value, 0) / weights).to(out.dtype.element_ty))
            tl.store(out_lse + tl.program_id(0), peak + tl.log2(weights))


class FusedTuning(NamedTuple):
    """How fused_decode_kernel is built and launched."""

    tile: int  # tokens a step
    warps: int
    stages: int  # steps loaded ahead, plus one
    programs: int  # a multiprocessor
    registers: int | None = None  # the most a thread may have
    overlap: bool = False  # start it while the first kernel still runs (SM90 and newer)


def fused_tuning(device):
    """The tuning for a GPU: by the shared memory that a block can have (99 KB: SM86, SM89, SM120; 227 KB: SM90, SM100)."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    if shared >= 200 * 1024:
        return FusedTuning(tile=64, warps=4, stages=3, programs=2)
    return FusedTuning(tile=32, warps=4, stages=3, programs=1)


# Partial results of the splits, by device and heads: they grow with the batch. Captured graphs keep an address, so an
# outgrown buffer is kept too.
fused_parts = {}


def fused_part(device, heads, rows):
    """float16 [rows, heads, 512] and float32 [heads, rows]."""
    kept = fused_parts.setdefault((device, heads), [])
    if not kept or kept[-1][0].shape[0] < rows:
        rows = 1 << (rows - 1).bit_length()
        part = torch.empty((rows, heads, 512), dtype=torch.float16, device=device)
        part_lse = torch.empty((heads, rows), dtype=torch.float32, device=device)
        kept.append((part, part_lse))
        _mlapatch_logger.info(
            "mlapatch: %d bytes for the partial results of fused-decode, shared by all layers",
            part.numel() * 2 + part_lse.numel() * 4,
        )
    return kept[-1]


def fused_attention(
    query,
    query_rope,
    pool,
    kv_indices,
    kv_indptr,
    num_requests,
    scale,
    out,
    tuning=None,
):
    """Decode attention over FP8 slots: out [requests, heads, 512] and the base-2 log-sum-exp [requests, heads].

    query: [requests, heads, 512], query_rope: [requests, heads, 64], bfloat16 or float16; pool: [slots, 1, >= 576],
    e4m3 or e5m2, of which only the slots kv_indices[:kv_indptr[num_requests]] are read. Every size is fixed by the
    shapes: no wait for the device.
    """
    heads = query.shape[1]
    out_lse = torch.empty(
        (query.shape[0], heads), dtype=torch.float32, device=out.device
    )
    if num_requests == 0:
        return out_lse
    interpreted = pool.device.type != "cuda"
    if interpreted:
        tuning = tuning or FusedTuning(tile=16, warps=4, stages=1, programs=2)
        processors, capability = 2, (0, 0)
    else:
        tuning = tuning or fused_tuning(pool.device)
        properties = torch.cuda.get_device_properties(pool.device)
        processors = properties.multi_processor_count
        capability = (properties.major, properties.minor)
    block = 8 if heads <= 8 else 16
    blocks = -(-heads // block)
    programs = max(1, processors * tuning.programs // blocks)
    part, part_lse = fused_part(pool.device, heads, programs + num_requests)
    words = query.view(torch.int32)
    rope_words = query_rope.view(torch.int32)
    fused_decode_kernel[(programs, blocks)](
        words,
        rope_words,
        pool.view(torch.int16),
        kv_indices,
        kv_indptr,
        part,
        part_lse,
        out,
        out_lse,
        num_requests,
        kv_indices.numel(),
        heads,
        part_lse.shape[1],
        scale,
        words.stride(0),
        words.stride(1),
        rope_words.stride(0),
        rope_words.stride(1),
        ROW=pool.stride(0) // 2,
        TILE=tuning.tile,
        WARPS=tuning.warps,
        HEADS=block,
        REQUESTS=1 << (num_requests - 1).bit_length(),
        WIDE=pool.shape[0] * (pool.stride(0) // 2) >= 2**31,
        E5M2=pool.dtype == torch.float8_e5m2,
        HALF=query.dtype == torch.float16,
        CONVERT=capability >= (8, 9),
        ASM=not interpreted,
        OVERLAP=tuning.overlap,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        **({"maxnreg": tuning.registers} if tuning.registers else {}),
    )
    # The pieces of a request that a batch of equal lengths gives, in one step or few.
    pieces = min(max(8, 1 << (programs // num_requests).bit_length()), 128)
    columns = min(4096 // pieces, 512)
    fused_decode_combine[(num_requests * heads, 512 // columns)](
        part,
        part_lse,
        kv_indptr,
        out,
        out_lse,
        num_requests,
        kv_indices.numel(),
        heads,
        programs,
        part_lse.shape[1],
        TILE=tuning.tile,
        PIECES=pieces,
        BLOCK=columns,
        ALL_PIECES=1 << (programs - 1).bit_length(),
        OVERLAP=tuning.overlap,
        num_warps=4,
        **({"launch_pdl": True} if tuning.overlap else {}),
    )
    return out_lse
