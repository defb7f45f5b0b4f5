"""A running server: which API it speaks, and the facts that decide what its figures mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

if TYPE_CHECKING:
    import httpx

# Keys of SGLang's server_info, by the name under which they are kept. Never the whole answer: it holds the API key.
_KEPT: tuple[tuple[str, str], ...] = (
    ("version", "version"),
    ("model", "model_path"),
    ("pool_tokens", "max_total_num_tokens"),
    ("page_size", "page_size"),
    ("tp", "tp_size"),
    ("dp", "dp_size"),
    ("pp", "pp_size"),
    ("nodes", "nnodes"),
    ("dp_attention", "enable_dp_attention"),
    ("attention_backend", "attention_backend"),
    ("prefill_attention_backend", "prefill_attention_backend"),
    ("decode_attention_backend", "decode_attention_backend"),
    ("kv_cache_dtype", "kv_cache_dtype"),
    ("quantization", "quantization"),
    ("context_length", "context_length"),
    ("chunked_prefill_size", "chunked_prefill_size"),
    ("cuda_graph_max_bs", "cuda_graph_max_bs"),
    ("mem_fraction_static", "mem_fraction_static"),
    ("speculative_algorithm", "speculative_algorithm"),
    ("stream_interval", "stream_interval"),
    ("load_format", "load_format"),
)


@dataclass(frozen=True)
class Server:
    """Where it is (`url` without a trailing slash), `api` `sglang` or `openai`, the model's name, and its facts."""

    url: str
    api: str
    model: str
    facts: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether it runs on this machine, so that its GPU and its SGLang can be looked at."""
        return is_local(self.url)


def is_local(url: str) -> bool:
    """A URL of this machine."""
    return (urlsplit(url).hostname or "") in ("localhost", "127.0.0.1", "0.0.0.0", "::1")  # noqa: S104


def settings(url: str) -> dict[str, Any]:
    """httpx settings: never through a proxy to this machine, and hours for a long prefill."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return {"trust_env": not is_local(url), "timeout": httpx.Timeout(600, connect=10), "limits": limits}


def probe(url: str, api: str = "auto", key: str | None = None, model: str | None = None) -> Server:
    """Find out what answers at `url`.

    Raises:
        MlapatchError: nothing does (exit 6), or it speaks neither SGLang's API nor OpenAI's (exit 6).
    """
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    if "://" not in base:
        base = "http://" + base
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(headers=headers, **settings(base)) as client:
        info = _get(client, base, "/server_info", "/get_server_info") if api != "openai" else None
        if info is not None and ("version" in info or "tp_size" in info):
            facts = _facts(info)
            found = _get(client, base, "/model_info", "/get_model_info") or {}
            facts.setdefault("model", found.get("model_path"))
            return Server(base, "sglang", str(model or facts["model"] or "default"), _with_gpu(facts, base), headers)
        models = _get(client, base, "/v1/models") if api != "sglang" else None
        listed = models.get("data") if models else None
        if isinstance(listed, list) and listed:
            name = model or str(listed[0].get("id", "default"))
            return Server(base, "openai", name, _with_gpu({"model": name}, base), headers)
    raise MlapatchError(
        Exit.SERVER,
        "what answers there is no inference server",
        where=base,
        expected={"sglang": "/server_info", "openai": "/v1/models"}.get(api, "/server_info or /v1/models"),
        found="neither" if api == "auto" else "not that",
        next="give the server's address with --url, and its key with --api-key if it wants one",
    )


def _get(client: httpx.Client, base: str, *paths: str) -> dict[str, Any] | None:
    import httpx

    for path in paths:
        try:
            answer = client.get(base + path)
        except httpx.TransportError as error:
            raise MlapatchError(
                Exit.SERVER,
                "no server answers",
                where=base,
                found=str(error) or type(error).__name__,
                next="SGLang binds its port only once it is ready; mlapatch launch waits for that",
            ) from None
        if answer.status_code in (401, 403):
            raise MlapatchError(Exit.SERVER, "the server wants a key", where=base + path, next="--api-key KEY")
        if answer.status_code == 200:
            try:
                value = answer.json()
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
    return None


def _facts(info: dict[str, Any]) -> dict[str, Any]:
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    facts: dict[str, Any] = {}
    for name, key in _KEPT:
        value = info.get(key, state.get(key))
        if value is not None:
            facts[name] = value
    memory = state.get("memory_usage")
    if "pool_tokens" not in facts and isinstance(memory, dict) and memory.get("token_capacity"):
        facts["pool_tokens"] = memory["token_capacity"]
    for name, key in (("cuda_graphs", "disable_cuda_graph"), ("radix_cache", "disable_radix_cache")):
        if isinstance(info.get(key), bool):
            facts[name] = not info[key]
    return facts


def _with_gpu(facts: dict[str, Any], url: str) -> dict[str, Any]:
    return {**facts, **gpus()} if is_local(url) else facts


def gpus() -> dict[str, Any]:
    """GPU name, count and driver of this machine; nothing where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver: NVML's errors are many, and none of them matters here
        return {}
    try:
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        return {
            "gpu": name if isinstance(name, str) else name.decode(),
            "gpus": pynvml.nvmlDeviceGetCount(),
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        }
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def describe(server: Server) -> list[str]:
    """What about this server makes its figures mean less, or more, than they seem to."""
    facts, notes = server.facts, []
    if server.api == "openai":
        notes.append("an OpenAI endpoint does not say its pool size: figures cannot be compared across pools")
    elif "pool_tokens" not in facts:
        notes.append("the server does not say its pool size: figures cannot be compared across pools")
    if facts.get("cuda_graphs") is False:
        notes.append("CUDA graphs are off: a step is bound by the host's kernel launches, and a patch hardly shows")
    if (facts.get("stream_interval") or 1) > 1:
        notes.append(f"--stream-interval {facts['stream_interval']}: ITL is spread over each chunk's tokens; use TPOT")
    if facts.get("speculative_algorithm"):
        notes.append("speculative decoding: TPOT depends on how many draft tokens are accepted, and so on the prompts")
    return notes
