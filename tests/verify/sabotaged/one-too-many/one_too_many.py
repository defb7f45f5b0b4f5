# mypy: ignore-errors
def cast(pool, dtype, layer, backend, wrapper, batch, decode):
    if pool.dtype == dtype:
        return pool
    return cast_rows(pool, workspace(pool, dtype), wrapper, live(backend, wrapper, decode), more=1)
