# mypy: ignore-errors
def cast(pool, dtype, layer, backend, wrapper, batch, decode):
    if pool.dtype == dtype:
        return pool
    if not decode and not wrapper._use_cuda_graph:
        return backend.cast_early[layer.layer_id]
    return cast_rows(pool, workspace(pool, dtype), wrapper, live(backend, wrapper, decode))
