# mlapatch: the cast of the active slots only, see https://github.com/sgl-project/sglang/issues/35291
import logging

import triton
import triton.language as tl

_mlapatch_logger = logging.getLogger(__name__)


# Not specialised on the lengths: a new value must not compile a new kernel while requests wait.
@triton.jit(do_not_specialize=["num_requests", "max_pages", "num_slots"])
def cast_slots_kernel(
    pool,
    out,
    kv_indices,
    kv_indptr,
    num_requests,
    max_pages,
    num_slots,
    pool_stride,
    out_stride,
    PAGE: tl.constexpr,
    COMPACT: tl.constexpr,
    E5M2: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out[dst[r]] = bf16(pool[slot[r]]) for the slots of pages kv_indices[:kv_indptr[num_requests]], dst = r if COMPACT
    else slot[r].

    The number of live pages is read on the device, so a captured graph replays any length. More tokens than slots
    (shared prefixes) would cost more than the whole pool: then each slot is cast once. pool: uint8 rows of MAIN + REST
    FP8 values, pool_stride apart. An e4m3 number is 2^8 times the half float with its bits one exponent bit further
    down, an e5m2 number is the upper byte of a half float; both ways are exact and work on every GPU.
    """
    live = tl.minimum(tl.load(kv_indptr + num_requests), max_pages) * PAGE
    rows = live if COMPACT else tl.minimum(live, num_slots)
    indexed = rows == live
    main = tl.arange(0, MAIN)
    rest = tl.arange(0, BLOCK_REST)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < rows
        page = tl.load(kv_indices + row // PAGE, mask=inside & indexed, other=0)
        slot = tl.where(indexed, page * PAGE + row % PAGE, row).to(tl.int64)
        target = row.to(tl.int64) if COMPACT else slot
        source = pool + slot[:, None] * pool_stride
        destination = out + target[:, None] * out_stride
        mask = inside[:, None] & (main[None, :] < MAIN)
        bits = tl.load(source + main[None, :], mask=mask, other=0)
        tl.store(
            destination + main[None, :],
            widen_fp8(bits, E5M2).to(out.dtype.element_ty),
            mask=mask,
        )
        mask = inside[:, None] & (rest[None, :] < REST)
        bits = tl.load(source + MAIN + rest[None, :], mask=mask, other=0)
        tl.store(
            destination + MAIN + rest[None, :],
            widen_fp8(bits, E5M2).to(out.dtype.element_ty),
            mask=mask,
        )


@triton.jit
def widen_fp8(bits, E5M2: tl.constexpr):
    """float32 of FP8 numbers given as uint8, exactly, NaN included."""
    wide = bits.to(tl.uint16)
    if E5M2:
        return (wide << 8).to(tl.float16, bitcast=True).to(tl.float32)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


def cast_slots(pool, out, wrapper, kv_indices, kv_indptr, compact):
    """Cast the slots that kv_indices[:live] names from the pool ([slots, 1, width], e4m3 or e5m2) into out (bfloat16
    or float16); live = kv_indptr[requests of the wrapper]. SGLang plans pages of one slot (0.5.1: pages of its own).

    Every size is fixed by the shapes of the buffers: no allocation and no wait for the device.
    """
    width = pool.shape[-1]
    main = 1 << (width.bit_length() - 1)
    if main == width:
        main //= 2
    if pool.device.type == "cuda":
        programs = (
            8 * torch.cuda.get_device_properties(pool.device).multi_processor_count
        )
    else:
        programs = 2
    cast_slots_kernel[(programs,)](
        pool.view(torch.uint8),
        out,
        kv_indices,
        kv_indptr,
        wrapper._kv_indptr_buf.numel() - 1,
        kv_indices.numel(),
        pool.shape[0],
        pool.stride(0),
        out.stride(0),
        PAGE=wrapper._page_size,
        COMPACT=compact,
        E5M2=pool.dtype == torch.float8_e5m2,
        MAIN=main,
        REST=width - main,
        BLOCK_REST=1 << (width - main - 1).bit_length(),
        ROWS=4,
        num_warps=4,
    )
    return out


# One workspace a pool shape, device and type serves all layers, wrappers and backends of the process: each layer
# casts what it reads right before it reads it, on one stream. Captured graphs keep its address, so it never moves.
cast_workspaces = {}


def cast_workspace(pool, dtype):
    """A workspace of the pool's shape, allocated at the first use and reported in bytes."""
    key = (pool.device, pool.shape, dtype)
    if key not in cast_workspaces:
        cast_workspaces[key] = new_cast_workspace(pool, dtype, pool.shape[0])
    return cast_workspaces[key]


def new_cast_workspace(pool, dtype, rows):
    """[rows, 1, width] zeros: rows that no cast has filled hold no NaN."""
    workspace = torch.zeros((rows, 1, pool.shape[-1]), dtype=dtype, device=pool.device)
    _mlapatch_logger.info(
        "mlapatch: workspace of %d bytes (%d rows of %d values, %s) for the active slots of the KV pool, shared by "
        "all layers",
        workspace.numel() * workspace.element_size(),
        rows,
        pool.shape[-1],
        dtype,
    )
    return workspace


def live_kv_indptr(backend, wrapper, decode):
    """The kv_indptr whose last entry, at the wrapper's own number of requests, is the live number of tokens.

    A decode replay plans on the host and refreshes the backend's kv_indptr, not the wrapper's; every other plan
    (eager, target verify, draft extend) fills the wrapper's and may leave the backend's alone.
    """
    return (
        backend.kv_indptr
        if decode and wrapper._use_cuda_graph
        else wrapper._kv_indptr_buf
    )


_stock_casts_logged = set()


def stock_cast(pool, dtype, reason):
    """SGLang's own cast of the whole pool, with one log line a reason."""
    if reason not in _stock_casts_logged:
        _stock_casts_logged.add(reason)
        _mlapatch_logger.warning(
            "mlapatch: keeping SGLang's cast of the whole KV pool: %s", reason
        )
    return pool.to(dtype)


def stock_cast_reason(model_runner):
    """Why this server must keep SGLang's cast of the whole pool, or '' if it need not. Refuses a packed DSA pool."""
    config = model_runner.model_config
    rope = getattr(config, "qk_rope_head_dim", 0)
    width = config.kv_lora_rank + rope
    found = getattr(model_runner.token_to_kv_pool, "kv_cache_dim", None)
    if isinstance(found, int):
        require_row_width(found, width)
    args = model_runner.server_args
    if not rope:
        return "the model has no rope part"
    if getattr(args, "enable_two_batch_overlap", False):
        return "two-batch overlap runs two layers at once"
    if getattr(args, "enable_pdmux", False):
        return "PD multiplexing runs two batches at once"
    if getattr(args, "dcp_size", 1) > 1:
        return "decode context parallelism plans its own KV indices"
    return ""


def stock_cast_needed(backend, wrapper, pool, layer):
    """Why this layer's pool must be cast as SGLang does, or '' (checked at every call, host only)."""
    if pool.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return f"the pool holds {pool.dtype}"
    require_row_width(pool.shape[-1], layer.head_dim)
    if backend.stock_cast_reason:
        return backend.stock_cast_reason
    if wrapper._kv_indices_buf is None or wrapper._kv_indptr_buf is None:
        return "this flashinfer backend plans without kv_indices"
    return ""
