# mypy: ignore-errors
# A cast of active slots as short as it can be, for folders that each get one thing wrong.
import triton
import triton.language as tl


@triton.jit
def cast_rows_kernel(
    pool,
    out,
    source,
    count,
    requests,
    more,
    limit,
    factor,
    shift,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out[source[r]] = pool[source[r] + shift] * factor for r < count[requests] + more; float32 in between."""
    n = tl.minimum(tl.load(count + requests) + more, limit)
    cols = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        slot = tl.load(source + row, mask=row < n, other=0).to(tl.int64)
        mask = (row < n)[:, None] & (cols < WIDTH)[None, :]
        value = tl.load(pool + (slot + shift)[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out + slot[:, None] * WIDTH + cols[None, :], (value * factor).to(out.dtype.element_ty), mask=mask)


def cast_rows(pool, out, wrapper, indptr, requests=None, more=0, limit=None, factor=1.0, shift=0):
    """Casts, in place, the slots that the wrapper reads: `indptr[requests] + more` tokens, at most `limit`."""
    indices = wrapper._kv_indices_buf
    requests = wrapper._kv_indptr_buf.numel() - 1 if requests is None else requests
    limit = indices.numel() if limit is None else limit
    width = pool.shape[-1]
    cast_rows_kernel[(2,)](
        pool,
        out,
        indices,
        indptr,
        requests,
        more,
        limit,
        factor,
        shift,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=16,
    )
    return out


workspaces = {}


def workspace(pool, dtype):
    """One for all layers."""
    key = (pool.device, pool.shape, dtype)
    if key not in workspaces:
        workspaces[key] = torch.zeros(pool.shape, dtype=dtype, device=pool.device)
    return workspaces[key]


def live(backend, wrapper, decode):
    """The kv_indptr that holds the live number of tokens."""
    return backend.kv_indptr if decode and wrapper._use_cuda_graph else wrapper._kv_indptr_buf


def refuse(width, expected):
    """Refuses rows that are not 576 wide."""
    if width != expected:
        raise RuntimeError(
            f"the pool's rows are {width} wide, expected {expected}: start the server with --nsa-prefill-backend trtllm "
            "and --nsa-decode-backend trtllm (or --dsa-prefill-backend and --dsa-decode-backend)"
        )
