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
        tile = 16 if small or fused_triton < (3, 4) else 32
        return FusedTuning(tile, warps=4, stages=3, programs=2)
    overlap = torch.cuda.get_device_capability(device) >= (9, 0)
    if few or small or block > 8:  # a tile sooner, fewer pieces
        # Two programs of 44 KB fit into 99 KB; 16 heads take 68 KB, or 44 KB with tiles of 16 tokens.
        tile = 16 if small and block > 8 else 32
        return FusedTuning(tile, warps=4, stages=3, programs=2, overlap=overlap)
    return FusedTuning(tile=32, warps=2, stages=2, programs=4, overlap=overlap)


# The partial results of the splits, one memory for all layers: its size depends on the GPU, the tuning and the heads,
# not on the batch. Captured graphs keep the address.
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
    max_tokens = min(kv_indices.numel(), 2**31 - 1)
    # The pieces of a request that a batch of equal lengths gives, in one step or few; some 64 of their values a thread.
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
        max_tokens,
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
        max_tokens,
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
    if not stock_cast_needed(backend, wrapper, pool, layer, dcp=True):
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
