"""What a simulated engine is told at its start, and the switches that can be thrown later."""

import ipaddress
import math
from typing import Literal

import msgspec

from loadtest.sim.wire import Encoding, HashForm


class SimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated engine. Lengths are tokens, speeds tokens per second (``inf``: at once)."""

    model: str = "sim"
    """Served model id, the first of ``/v1/models``."""
    model_path: str = ""
    """Folder of tokenizer and chat template, shown as the model's ``root``; "" = bytes are tokens."""
    adapters: dict[str, str] = {}
    """LoRA adapters: name -> path."""
    max_model_len: int = 8192
    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the kernel choose; ``SimEngine.url`` tells."""

    block_size: int = 16
    num_blocks: int = 2048
    """Blocks in the pool, the null block included."""
    hash_seed: str = ""
    """Engines with different seeds write different hashes for the same tokens."""

    max_num_seqs: int = 256
    prefill_rate: float = math.inf
    """Over all requests: prompts are computed one after the other."""
    decode_rate: float = math.inf
    """Per request."""
    output_tokens: int = 16
    """Natural length of an answer; ``max_tokens`` below it ends it with "length"."""
    seed: int = 0

    events_endpoint: str = ""
    """PUB endpoint, "" = no events. Binds as vLLM does: only with ``*``, ``::``, ipc or inproc;
    a plain ``tcp://host:port`` connects, so the listener must bind."""
    replay_endpoint: str = ""
    topic: str = ""
    encoding: Encoding = "map"
    hash_form: HashForm = "int"
    dp_rank: int = 0
    buffer_steps: int = 10_000

    dev_mode: bool = False
    """Serves ``POST /reset_prefix_cache``, as VLLM_SERVER_DEV_MODE=1 does."""
    prompt_tokens_details: bool = True
    """Reports ``cached_tokens``, as --enable-prompt-tokens-details does."""
    fast: bool = False
    """For benchmarks: no tokens, no cache, no queue; canned answers at once (16 chunks when streamed)."""
    record: int = 1024
    """How many requests to keep for ``SimEngine.requests``; 0 keeps none."""

    def __post_init__(self) -> None:
        if not ipaddress.ip_address(self.host).is_loopback:
            raise ValueError("a simulated engine listens on loopback only")
        if self.prefill_rate <= 0 or self.decode_rate <= 0 or self.max_num_seqs < 1:
            raise ValueError("speeds and max_num_seqs must be positive")


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can go wrong on purpose. The default is health.

    Shares are probabilities from 0 to 1, decided by a generator seeded with ``seed`` at each change.
    """

    seed: int = 0

    drop_events: float = 0.0
    """Share of batches that are never published (their number is used; a replay has them)."""
    duplicate_events: float = 0.0
    """Share of batches published twice."""
    reorder_events: float = 0.0
    """Share of batches held back until the next one has been published."""
    delay_events: float = 0.0
    """Seconds between a batch's number being given and its publication."""
    stall_events: bool = False
    """Nothing is published; when it ends all that waited goes out in order."""
    garbage_events: int = 0
    """That many malformed messages are published, one before each of the next batches."""

    hang: bool = False
    """Requests are accepted and never answered."""
    hang_after: int | None = None
    """Streams stop after that many tokens and stay open."""
    die_at_once: bool = False
    """The connection is cut before the first byte of the answer."""
    die_after: int | None = None
    """The connection is cut after that many tokens. With 0 a stream has its head but no event yet:
    vLLM too sends the head before the prompt is computed."""
    exit_after: int | None = None
    """As ``die_after``, and then the whole engine goes: the process exits, an in-process one stops."""
    fail_next: int = 0
    """That many requests are answered with ``fail_status``."""
    fail_status: int = 500
    slow: float = 0.0
    """Seconds added before the first byte."""
    unhealthy: bool = False
    """``/health`` answers 503."""
    malformed_sse: bool = False
    """Streamed chunks hold broken JSON."""


RestartSeq = Literal["zero", "continue"]
"""A restarted engine numbers its events from 0, or happens to go on where the old one stopped."""
