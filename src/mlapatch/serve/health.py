"""`/health` as SGLang answers it, and one prompt whose answer must make sense. Proxies are never asked."""

from __future__ import annotations

import threading
import time
import unicodedata
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx

_HEALTH_TIMEOUT = 25.0  # SGLang itself waits up to 20 s for its scheduler (SGLANG_HEALTH_CHECK_TIMEOUT)
PROMPT = "The capital city of France is"
_TOKENS = 16


class Health(Enum):
    """What `/health` said. Refused: not bound, still loading. Unhealthy: warming up, or a silent scheduler."""

    UNASKED = "not asked yet"
    REFUSED = "connection refused"
    UNHEALTHY = "503"
    UP = "200"
    SLOW = "no answer in time"
    OTHER = "an unexpected answer"


def client(timeout: float) -> httpx.Client:
    """A client that no proxy variable, .netrc or certificate variable can divert."""
    return httpx.Client(trust_env=False, timeout=timeout)


def ask(url: str, http: httpx.Client) -> Health:
    """One request to `/health`."""
    try:
        status = http.get(f"{url}/health").status_code
    except httpx.TimeoutException:
        return Health.SLOW
    except httpx.HTTPError:
        return Health.REFUSED
    return {200: Health.UP, 503: Health.UNHEALTHY}.get(status, Health.OTHER)


class Poller:
    """Asks `/health` in the background, since an answer may take 20 s."""

    def __init__(self, url: str, interval: float) -> None:
        self.url = url
        self.last = Health.UNASKED
        self.unhealthy = 0
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="health")
        self._thread.start()

    def _run(self) -> None:
        with client(_HEALTH_TIMEOUT) as http:
            while not self._stop.is_set():
                self.last = ask(self.url, http)
                self.unhealthy += self.last is Health.UNHEALTHY
                self._stop.wait(self._interval)

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()


@dataclass(frozen=True)
class Answer:
    """What the server answered to one prompt; `problem` is '' where it makes sense."""

    text: str
    tokens: int
    seconds: float
    problem: str = ""


def try_prompt(url: str, *, api_key: str = "", ids: bool = False, timeout: float = 120.0) -> Answer:
    """Ask for a few tokens through `/generate`, greedily; with token ids where the server has no tokenizer."""
    body: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": ids}}
    body |= {"input_ids": [10, 11, 12]} if ids else {"text": PROMPT}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    began = time.monotonic()
    try:
        with client(timeout) as http:
            response = http.post(f"{url}/generate", json=body, headers=headers)
    except httpx.HTTPError as error:
        return Answer("", 0, time.monotonic() - began, f"the prompt got no answer ({type(error).__name__})")
    took = time.monotonic() - began
    if response.status_code != 200:
        return Answer("", 0, took, f"the prompt was answered with HTTP {response.status_code}: {response.text[:200]}")
    try:
        answer = response.json()
        answer = answer[0] if isinstance(answer, list) else answer
        tokens = int(answer.get("meta_info", {}).get("completion_tokens", 0))
        text = str(answer.get("text") or "")
        output = [int(token) for token in answer.get("output_ids") or ()]
    except (ValueError, TypeError, AttributeError, IndexError):
        return Answer("", 0, took, f"the prompt's answer is no JSON of SGLang's: {response.text[:200]}")
    problem = judge_ids(output) if ids else judge_text(text, tokens)
    return Answer(text or str(output), tokens or len(output), took, problem)


def judge_text(text: str, tokens: int) -> str:
    """Why an answer is garbage; '' where it may be language. The signs are those of a misread KV pool."""
    shown = text.strip()
    if tokens < 2 or len(shown) < 2:
        return f"the answer stops after {tokens} token(s): {text!r}"
    strange = sum(
        c == "\ufffd" or unicodedata.category(c) in ("Cc", "Cn", "Co", "Cs") for c in shown if c not in "\n\t"
    )
    if strange > len(shown) / 5:
        return f"the answer is not text: {text[:80]!r}"
    words = shown.split()
    if len(set(shown.replace(" ", ""))) <= 2 or (len(words) >= 6 and len(set(words)) == 1):
        return f"the answer repeats itself: {text[:80]!r}"
    return ""


def judge_ids(output: list[int]) -> str:
    """The same for a server without a tokenizer, where only ids can be judged."""
    if len(output) < 2:
        return f"the answer stops after {len(output)} token(s)"
    if len(set(output)) == 1 and len(output) >= 4:
        return f"the answer repeats one token: {output[:8]}"
    return ""
