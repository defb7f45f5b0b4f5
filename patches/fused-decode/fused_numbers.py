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
def scaled_half(words, up, BYTES: tl.constexpr):
    """float16 of up times one bfloat16 number of each int32 word: BYTES picks its two bytes, over two zeros (4)."""
    return tl.inline_asm_elementwise(
        f"""
        {{
        .reg .b32 bits;
        .reg .f32 first, second;
        prmt.b32 bits, $1, 0, {BYTES};
        mov.b32 first, bits;
        mul.f32 first, first, $3;
        prmt.b32 bits, $2, 0, {BYTES};
        mov.b32 second, bits;
        mul.f32 second, second, $4;
        cvt.rn.f16x2.f32 $0, second, first;
        }}
        """,
        "=&r,r,r,r,r",
        [words, up],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled_pair(words, up, HALF: tl.constexpr, ASM: tl.constexpr):
    """float16 of up times the lower and times the upper bfloat16 (HALF: float16) number of int32 words."""
    if HALF or not ASM:
        even, odd = float_pair(words, HALF)
        return (even * up).to(tl.float16), (odd * up).to(tl.float16)
    # The compiler moves a change of layout in front of inline assembly that has one result: one for the words instead
    # of two for their float32 halves.
    up = tl.broadcast_to(up, words.shape)
    return scaled_half(words, up, "0x1044"), scaled_half(words, up, "0x3244")


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
    wait). No access to memory moves across it; arithmetic may, but for what the result is used in."""
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
