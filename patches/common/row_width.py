def require_row_width(found, expected):
    """Refuse a pool whose rows are not the latent vectors (the packed DSA pool): its scale bytes read as values."""
    if found != expected:
        raise RuntimeError(
            f"mlapatch: the rows of the KV pool are {found} wide, and flashinfer MLA attention reads {expected}. This is "
            "the packed FP8 pool of a DSA model: start the server with both --nsa-prefill-backend trtllm and "
            "--nsa-decode-backend trtllm (newer releases: --dsa-prefill-backend trtllm and --dsa-decode-backend "
            "trtllm) to get the raw pool, or use another attention backend."
        )
