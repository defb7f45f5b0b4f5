# mypy: ignore-errors
def cast(pool, dtype, layer, backend, wrapper, batch, decode):
    if pool.dtype == dtype:
        return pool
    return cast_rows(
        pool, workspace(pool, dtype), wrapper, torch.full_like(wrapper._kv_indptr_buf, wrapper._kv_indices_buf.numel())
    )
