# mypy: ignore-errors
def cast(pool, dtype, layer, backend, wrapper, batch, decode):
    if pool.dtype == dtype:
        return pool
    if layer.layer_id > 0:
        return workspace(pool, dtype)
    return cast_rows(pool, workspace(pool, dtype), wrapper, live(backend, wrapper, decode))
