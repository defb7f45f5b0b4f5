# mlapatch: the cast of the active slots only, see https://github.com/sgl-project/sglang/issues/35291
import logging

import triton
import triton.language as tl

_mlapatch_logger = logging.getLogger(__name__)


# Not specialised on the lengths: a new value must not compile a new kernel while
# requests wait.
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
    BITS: tl.constexpr,
    PEERS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out[target] = pool[slot] for each slot of pages kv_indices[:kv_indptr[num_requests]];
    target is the row's place in kv_indices if COMPACT, else the slot itself.

    Programs: (any number, requests). Lengths are read on the device, so a captured graph
    replays any. In place, a page that one of the two requests before has at the same
    position (PEERS; a shared prefix) is cast there and skipped here, and more tokens than
    slots would cost more than the pool: then each slot is cast once. Rows of pool and out
    are MAIN + REST values, *_stride apart.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    request = tl.program_id(1)
    total = tl.minimum(tl.load(kv_indptr + num_requests), max_pages) * PAGE
    some = request < num_requests
    begin = tl.load(kv_indptr + request, mask=some, other=0)
    end = tl.load(kv_indptr + request + 1, mask=some, other=0)
    begin_1 = tl.load(kv_indptr + request - 1, mask=request >= 1, other=0)
    begin_2 = tl.load(kv_indptr + request - 2, mask=request >= 2, other=0)
    rows = tl.minimum(end * PAGE, total) - begin * PAGE
    whole = (total > num_slots) & (not COMPACT)
    if whole:
        rows = num_slots
        program += programs * request
        programs *= tl.num_programs(1)
    main = tl.arange(0, MAIN)
    rest = tl.arange(0, BLOCK_REST)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = start + tl.arange(0, ROWS)
        live = row < rows
        listed = live & (not whole)
        position = row // PAGE
        page = tl.load(kv_indices + begin + position, mask=listed, other=0)
        if PEERS:
            there = listed & (request >= 1) & (position < begin - begin_1)
            peer = tl.load(kv_indices + begin_1 + position, mask=there, other=-1)
            live &= peer != page
            there = listed & (request >= 2) & (position < begin_1 - begin_2)
            peer = tl.load(kv_indices + begin_2 + position, mask=there, other=-1)
            live &= peer != page
        # A tile without a live row must not convert anything: conversions are the limit.
        alive = 1
        if PEERS:
            alive = tl.max(live.to(tl.int32), axis=0)
        if alive > 0:
            slot = tl.where(listed, page * PAGE + row % PAGE, row).to(tl.int64)
            target = (begin * PAGE + row).to(tl.int64) if COMPACT else slot
            source = pool + slot[:, None] * pool_stride
            destination = out + target[:, None] * out_stride
            mask = live[:, None] & (main[None, :] < MAIN)
            values = tl.load(source + main[None, :], mask=mask)
            values = widen_fp8(values, BITS).to(out.dtype.element_ty)
            tl.store(destination + main[None, :], values, mask=mask)
            mask = live[:, None] & (rest[None, :] < REST)
            values = tl.load(source + MAIN + rest[None, :], mask=mask)
            values = widen_fp8(values, BITS).to(out.dtype.element_ty)
            tl.store(destination + MAIN + rest[None, :], values, mask=mask)


@triton.jit
def widen_fp8(values, BITS: tl.constexpr):
    """FP8 values as they are (BITS 0: the GPU converts them), or as float32 from bytes.

    Exactly and NaN included: an e4m3 number (BITS 4) is 2^8 times the half float that has
    its bits one exponent bit further down, an e5m2 number (BITS 5) is the upper byte of a
    half float.
    """
    if BITS == 0:
        number = values
    elif BITS == 5:
        wide = values.to(tl.uint16)
        number = (wide << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = values.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        number = tl.where((wide & 0x7F) == 0x7F, float("nan"), number)
    return number


def cast_slots(pool, out, wrapper, kv_indices, kv_indptr, compact):
    """Cast the slots that kv_indices[:live] names from the pool ([slots, 1, width], e4m3 or
    e5m2) into out (bfloat16 or float16); live = kv_indptr[requests of the wrapper]. SGLang
    plans pages of one slot (0.5.1: pages of its own).

    Every size is fixed by the shapes of the buffers: no allocation and no wait for the
    device.
    """
    width = pool.shape[-1]
    main = 1 << (width.bit_length() - 1)
    if main == width:
        main //= 2
    requests = wrapper._kv_indptr_buf.numel() - 1
    programs, bits = 2, 5 if pool.dtype == torch.float8_e5m2 else 4
    if pool.device.type == "cuda":
        properties = torch.cuda.get_device_properties(pool.device)
        programs = triton.cdiv(8 * properties.multi_processor_count, max(requests, 1))
        if (properties.major, properties.minor) >= (8, 9):
            bits = 0
    cast_slots_kernel[(programs, max(requests, 1))](
        pool.view(torch.uint8) if bits else pool,
        out,
        kv_indices,
        kv_indptr,
        requests,
        kv_indices.numel(),
        pool.shape[0],
        pool.stride(0),
        out.stride(0),
        PAGE=wrapper._page_size,
        COMPACT=compact,
        BITS=bits,
        PEERS=requests > 1 and not compact,
        MAIN=main,
        REST=width - main,
        BLOCK_REST=1 << (width - main - 1).bit_length(),
        ROWS=16 if requests > 1 else 8,
        num_warps=8,
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
        return dcp_reason
    return ""


dcp_reason = "decode context parallelism plans its own KV indices"


def stock_cast_needed(backend, wrapper, pool, layer, dcp=False):
    """Why this layer's pool must be cast as SGLang does, or '' (checked at every call, host only).

    dcp: the caller reads what the wrapper was planned with. In decode that is this rank's share of the KV indices, put
    together in the buffers that any other plan has.
    """
    if pool.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return f"the pool holds {pool.dtype}"
    require_row_width(pool.shape[-1], layer.head_dim)
    if backend.stock_cast_reason and not (
        dcp and backend.stock_cast_reason == dcp_reason
    ):
        return backend.stock_cast_reason
    if wrapper._kv_indices_buf is None or wrapper._kv_indptr_buf is None:
        return "this flashinfer backend plans without kv_indices"
    return ""
