# mlapatch: flashinfer's own FP8 MLA instead of a cast, see https://github.com/sgl-project/sglang/pull/35322
import importlib.metadata
import logging

_mlapatch_logger = logging.getLogger(__name__)


def fp8_plan_kv_dtype(model_runner):
    """The KV dtype to plan with: float8_e4m3fn where this server's pool, GPU and flashinfer can, else the model's.

    Raises at server start where the pool is FP8 e4m3 and the GPU or flashinfer cannot run it, since an image may have
    moved to another GPU after the patch was applied.
    """
    config = model_runner.model_config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    found = getattr(model_runner.token_to_kv_pool, "kv_cache_dim", None)
    if isinstance(found, int):
        require_row_width(found, width)
    dtype = model_runner.kv_cache_dtype
    reason = ""
    if dtype == model_runner.dtype:
        return model_runner.dtype
    if dtype != torch.float8_e4m3fn:
        reason = (
            f"flashinfer's FP8 MLA takes float8_e4m3fn only, and the pool holds {dtype}"
        )
    elif model_runner.dtype != torch.bfloat16:
        reason = f"flashinfer's FP8 MLA takes a bfloat16 query only, and the model runs in {model_runner.dtype}"
    elif (config.kv_lora_rank, config.qk_rope_head_dim) != (512, 64):
        reason = f"flashinfer's FP8 MLA takes rows of 512 + 64 only, and the model has {config.kv_lora_rank} + {config.qk_rope_head_dim}"
    elif getattr(model_runner.server_args, "dcp_size", 1) > 1:
        reason = "decode context parallelism keeps a bfloat16 copy of its own"
    if reason:
        _mlapatch_logger.warning(
            "mlapatch: keeping SGLang's cast of the whole KV pool: %s", reason
        )
        return model_runner.dtype
    require_fp8_mla(model_runner.device)
    return dtype


def require_fp8_mla(device):
    """Raise unless this GPU is SM90 and flashinfer is 0.6.14 or newer (first with FP8 KV in MLA; SM90 to 0.7.4)."""
    version = importlib.metadata.version("flashinfer-python")
    numbers = tuple(
        int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit()
    )
    major, minor = torch.cuda.get_device_capability()
    if major != 9 or numbers < (0, 6, 14):
        raise RuntimeError(
            f"mlapatch: fp8-plan needs an SM90 GPU and flashinfer >= 0.6.14; this is SM{major}{minor} with flashinfer "
            f"{version}. Run: mlapatch revert fp8-plan && mlapatch apply active-cast"
        )


def fp8_plan_key_buffer(pool, dtype, layer, wrapper):
    """The pool itself ([slots, 1, width], in its own dtype) where the wrapper was planned for it, else its cast."""
    if pool.dtype == dtype:
        return pool
    require_row_width(pool.shape[-1], layer.head_dim)
    return pool if fp8_planned(wrapper) else pool.to(dtype)


def fp8_plan_scales(wrapper):
    """Extra arguments of run() after an FP8 plan. The pool is written without a scale, so both are 1, not k_scale."""
    return {"ckv_scale": 1.0, "kpe_scale": 1.0} if fp8_planned(wrapper) else {}


def fp8_planned(wrapper):
    """Whether the wrapper's last plan was for FP8 KV."""
    return getattr(wrapper, "_kv_data_type", None) == torch.float8_e4m3fn
