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
            # The addresses want the wait's result, the places in them do not: those can be computed before it.
            zero = tl.multiple_of(wait_for_kernel_before(start) - start, 128)
            # Not earlier: the next kernel may have the memory of what the first one reads.
            let_next_kernel_start()
        # The same for all pieces, so the first one's; to be read after the wait, as they are.
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
