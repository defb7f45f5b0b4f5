class LastKvIndices:
    """The slots of each wrapper's last eager plan, which itself holds 0..n-1: they index the compact workspace.

    A captured graph's plan is not changed (a replay could not change it), nor one of more tokens than the pool has
    slots (shared prefixes): those cast in place.
    """

    def __init__(self, model_runner):
        pool = model_runner.token_to_kv_pool
        fp8 = model_runner.kv_cache_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        self.max_rows = (
            getattr(pool, "size", 0) + getattr(pool, "page_size", 0) if fp8 else 0
        )
        self.by_wrapper = {}
        self.sequence = None

    def replan(self, backend, wrapper, kv_indices):
        """Save the slots that a wrapper is about to plan with; return the indices to plan with instead."""
        self.by_wrapper.pop(wrapper, None)
        tokens = kv_indices.numel()
        if (
            wrapper._use_cuda_graph
            or backend.stock_cast_reason
            or tokens > self.max_rows
        ):
            return kv_indices
        self.by_wrapper[wrapper] = kv_indices
        if self.sequence is None:
            self.sequence = torch.arange(
                self.max_rows, dtype=torch.int32, device=kv_indices.device
            )
        return self.sequence[:tokens]


def gather_cast(pool, dtype, layer, backend, wrapper, decode):
    """The layer's KV rows in `dtype` as the wrapper's plan indexes them: compact where it was planned with 0..n-1,
    in place otherwise. pool: [slots, 1, width]; result: [rows, 1, width].
    """
    if pool.dtype == dtype:
        return pool
    slots = backend.last_kv_indices.by_wrapper.get(wrapper)
    reason = stock_cast_needed(backend, wrapper, pool, layer)
    if reason:
        whole = stock_cast(pool, dtype, reason)
        return (
            whole
            if slots is None
            else whole.view(-1, wrapper._page_size, whole.shape[-1])[slots.long()].view(
                -1, 1, whole.shape[-1]
            )
        )
    kv_indptr = live_kv_indptr(backend, wrapper, decode)
    if slots is None:
        return cast_slots(
            pool,
            cast_workspace(pool, dtype),
            wrapper,
            wrapper._kv_indices_buf,
            kv_indptr,
            compact=False,
        )
    workspace = compact_workspace(pool, dtype, slots.numel() * wrapper._page_size)
    return cast_slots(pool, workspace, wrapper, slots, kv_indptr, compact=True)


compact_workspaces = {}


def compact_workspace(pool, dtype, rows):
    """A workspace of at least `rows` rows: the pool-shaped one where captured graphs already need it, else one that
    grows by powers of two with the context.
    """
    workspace = cast_workspaces.get((pool.device, pool.shape, dtype))
    if workspace is None or workspace.shape[0] < rows:
        key = (pool.device, pool.shape[-1], dtype)
        workspace = compact_workspaces.get(key)
        if workspace is None or workspace.shape[0] < rows:
            grown = max(4096, 1 << (max(rows, 1) - 1).bit_length())
            workspace = new_cast_workspace(
                pool, dtype, max(rows, min(grown, pool.shape[0]))
            )
            compact_workspaces[key] = workspace
    return workspace
