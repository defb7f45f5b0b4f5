def active_cast(pool, dtype, layer, backend, wrapper, decode):
    """The layer's KV pool in `dtype`, only the slots that this batch reads cast, in place.

    pool: [slots, 1, width]; the result has the same shape, so the plan and its kv_indices stay as they are. Rows of
    slots that are not in kv_indices hold old values and are not read.
    """
    if pool.dtype == dtype:
        return pool
    reason = stock_cast_needed(backend, wrapper, pool, layer, dcp=decode)
    if reason:
        return stock_cast(pool, dtype, reason)
    kv_indptr = live_kv_indptr(backend, wrapper, decode)
    return cast_slots(
        pool,
        cast_workspace(pool, dtype),
        wrapper,
        wrapper._kv_indices_buf,
        kv_indptr,
        compact=False,
    )
