"""Saves and restores the KV of Hugging Face transformers through the node: a ``DynamicCache`` in, the
same one out, bit for bit.

The shortest way through the protocol, and the proof that the node's bytes mean what we say. A block's
bytes are, layer after layer, its keys and then its values, each ``heads x tokens x head_size``; blocks
follow one another. One sequence, no padding, positions from 0 on: what is cached for the first tokens
then depends on nothing but them, the model and its adapter.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from cachenode.attachment import Attachment
from cachenode.client import NodeClient
from cachenode.connectors.link import Client
from cachenode.connectors.naming import Asked, Namer, Names
from cachenode.connectors.places import Attach, Attached
from cachenode.connectors.transfer import Bytes, Place, Transfer
from cachenode.record import Layout
from cachenode.wire import MAX_BLOCKS, Grant, Leased, Mode, Reply, Reserved

FAMILY = "transformers"
MEMORY = "layer/kv/head/token"
PATIENCE_S = 5.0
"""How long an answer of the node is waited for; without one, nothing is saved or restored."""

POLL_S = 0.002
NOTHING_MORE = Asked()
"""Neither an adapter nor a salt."""

_UNSAID = {"_name_or_path", "transformers_version"}
"""Of a configuration, what says where a model lies and who wrote it, not what it is."""


class UnfitCache(TypeError):
    """A cache whose bytes would not mean what the layout says; the message says why."""


class Blocks:
    """The states of one sequence, cut into blocks that count from its start; a ``transfer.Memory``."""

    def __init__(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]], layout: Layout) -> None:
        self._states, self._layout = states, layout
        self.block_bytes = layout.block_bytes

    def save(self, ids: Sequence[int], into: Bytes) -> None:
        for ours, record in self._pairs(ids, into):
            record.copy_(ours)

    def load(self, ids: Sequence[int], data: Bytes) -> None:
        for ours, record in self._pairs(ids, data):
            ours.copy_(record)

    def finish(self) -> None:
        """Nothing is under way here."""

    def _pairs(self, ids: Sequence[int], data: Bytes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same blocks (one run of them) in the states and in a record's bytes, of each layer's keys
        and values: blocks x heads x tokens x head_size."""
        of, count = self._layout, len(ids)
        shape = (count, of.layers, 2, of.heads, of.block_tokens, of.head_size)
        record = torch.from_numpy(data).view(getattr(torch, of.dtype)).view(shape)
        start, end = ids[0] * of.block_tokens, (ids[0] + count) * of.block_tokens
        for layer, pair in enumerate(self._states):
            for which, states in enumerate(pair):
                ours = states[0, :, start:end].unflatten(1, (count, of.block_tokens))
                yield ours.transpose(0, 1), record[:, layer, which]


class Prefixes:
    """Prefixes of one model's prompts, kept by a node. ``connect`` makes one.

    ``attach`` joins a session of ``client`` as its worker. ``asked`` names the adapter in use and the
    tenant's salt, which needs ``secret``, the deployment's. Not for several threads at once.
    """

    def __init__(
        self,
        client: Client,
        attach: Attach,
        layout: Layout,
        asked: Asked = NOTHING_MORE,
        *,
        secret: bytes | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client, self._attach, self._layout = client, attach, layout
        self._namer, self._asked = Namer(layout.model, layout.block_tokens, secret), asked
        if isinstance(refusal := self._namer.names(asked), str):
            raise ValueError(f"these prompts can have no names: {refusal}")
        self._patience_s = patience_s
        self._session = ""
        self._joined: Attached | None = None

    def save(self, cache: DynamicCache, tokens: Sequence[int]) -> int:
        """Offer the node what ``cache`` holds for the leading ``tokens``; return how many of them the
        node holds afterwards: whole blocks, at most what fitted. Raises UnfitCache."""
        refuse(cache, self._layout)
        place = self._place()
        names = self._names(tokens[: cache.get_seq_length()])
        if not names.blocks or place is None:
            return 0
        keys, proofs = names.keys(0, names.blocks), names.proofs(0, names.blocks)
        reply = self._answer(self._client.reserve(0, keys, proofs, names.adapter))
        if isinstance(reply, Reserved):
            self._write(cache, reply.grants, place)
        return self._layout.block_tokens * self._client.match(names.adapter, keys, proofs)

    def restore(self, tokens: Sequence[int]) -> tuple[DynamicCache, int]:
        """A cache of the longest leading part of ``tokens`` that the node holds, and its length: whole
        blocks, and never the last token, since a model needs one to say what follows. Anything that
        goes wrong is a shorter part, or none."""
        cache, place = DynamicCache(), self._place()
        names = self._names(tokens[:-1])
        keys, proofs = names.keys(0, names.blocks), names.proofs(0, names.blocks)
        held = self._client.match(names.adapter, keys, proofs) if names.blocks else 0
        if not held or place is None:
            return cache, 0
        keys, proofs = names.keys(0, held), names.proofs(0, held)
        reply = self._answer(self._client.lease(0, keys, proofs, names.adapter))
        if not isinstance(reply, Leased) or not reply.lease:
            return cache, 0
        try:
            states, length = self._read(reply, place)
        finally:
            self._client.release([reply.lease])
        for layer, pair in enumerate(states if length else ()):
            cache.update(pair[0][:, :, :length], pair[1][:, :, :length], layer)
        return cache, length

    def _write(self, cache: DynamicCache, grants: Sequence[Grant], place: Place) -> None:
        """Copies what was granted. Each grant is committed or aborted, whatever happens."""
        blocks, written = Blocks([layer[:2] for layer in cache], self._layout), list[int]()
        transfer = Transfer(blocks, rank=0)
        try:
            for grant in grants:
                if transfer.save(place, grant, range(grant.first, grant.first + grant.blocks)):
                    written.append(grant.reservation)
        finally:
            if left := [grant.reservation for grant in grants if grant.reservation not in written]:
                self._client.abort(left)
            if written:
                self._answer(self._client.commit(written))

    def _read(self, leased: Leased, place: Place) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        """States with room for what was leased, and how many leading tokens of them can be trusted."""
        of, length = self._layout, 0
        shape = (1, of.heads, leased.blocks * of.block_tokens, of.head_size)
        dtype = getattr(torch, of.dtype)
        states = [
            (torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(of.layers)
        ]
        transfer = Transfer(Blocks(states, of), rank=0)
        for number, piece in enumerate(leased.pieces):
            ids = range(piece.first, piece.first + piece.blocks)
            if ids.start * of.block_tokens != length:
                break
            if not transfer.load(place, leased.lease, number, piece, ids):
                break
            length = ids.stop * of.block_tokens
        return states, length

    def _names(self, tokens: Sequence[int]) -> Names:
        names = self._namer.names(self._asked)
        assert isinstance(names, Names), "the constructor would have refused"
        names.extend(tokens[: MAX_BLOCKS * self._layout.block_tokens])
        return names

    def _place(self) -> Place | None:
        """The worker's side of the session that is open now; None while there is none. A session that
        ended is left before the next one begins, which tells the node so."""
        if self._session != self._client.session:
            self._leave()
        for reply in self._client.poll():
            self._give_back(reply)
        if self._session != self._client.session:
            self._leave()
            self._session = self._client.session
        if self._session and self._joined is None:
            self._joined = self._attach(self._session)
        return self._joined

    def _leave(self) -> None:
        """Nothing is copied for the session any more: copies here are over when a call is."""
        if self._joined is not None:
            self._joined.close()
        if self._session:
            self._client.quiet(self._session)
        self._session, self._joined = "", None

    def _answer(self, ticket: object) -> Reply | None:
        """The reply, None where it did not come in time, or came in a session other than that of
        ``_joined``: what it names then lies in another node's memory."""
        reply = self._client.wait(ticket, self._patience_s) if isinstance(ticket, int) else None
        if self._client.session == self._session:
            return reply
        self._give_back(reply)
        return None

    def _give_back(self, reply: Reply | None) -> None:
        """What a reply that nobody waits for any more has granted."""
        if isinstance(reply, Reserved) and reply.grants:
            self._client.abort([grant.reservation for grant in reply.grants])
        if isinstance(reply, Leased) and reply.lease:
            self._client.release([reply.lease])

    def close(self) -> None:
        """Ends the session. What was saved stays with the node."""
        self._leave()
        self._client.close()


def connect(
    socket: str,
    layout: Layout,
    worker: str,
    asked: Asked = NOTHING_MORE,
    *,
    secret: bytes | None = None,
    mode: Mode = "map",
    patience_s: float = PATIENCE_S,
) -> Prefixes:
    """Prefixes kept by the node at ``socket``, which need not be there yet: waits for it ``patience_s`` at
    most. ``worker`` names this process to the node. Without a node nothing is saved or restored."""
    client = NodeClient(socket, layout, worker, lambda: secrets.token_hex(16), time.monotonic, mode=mode)

    def attach(session: str) -> Attached | None:
        return Attachment.join(socket, layout, worker, session, mode=mode)

    end = time.monotonic() + patience_s
    while not client.session and time.monotonic() < end:
        client.poll()
        time.sleep(POLL_S)
    return Prefixes(client, attach, layout, asked, secret=secret, patience_s=patience_s)


def layout_of(
    model: PreTrainedModel, name: str, *, block_tokens: int = 32, revision: str | None = None
) -> Layout:
    """The layout of a model's KV. ``name`` is the namespace's; ``revision`` tells apart what ``name``
    does not: ``digest(model)`` unless one is given. Raises BadLayout."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layout = Layout(
        family=FAMILY,
        model=name,
        revision=digest(model) if revision is None else revision,
        memory=MEMORY,
        dtype=str(model.dtype).removeprefix("torch."),
        layers=config.num_hidden_layers,
        heads=heads,
        head_size=head_size,
        block_tokens=block_tokens,
        block_bytes=config.num_hidden_layers * 2 * heads * block_tokens * head_size * model.dtype.itemsize,
    )
    layout.check()
    return layout


def digest(model: PreTrainedModel) -> str:
    """SHA-256 over the configuration and every weight as loaded, adapters included: about a second for
    a GB. Models too large for that are given a revision by their owner."""
    said = {key: value for key, value in model.config.to_dict().items() if key not in _UNSAID}
    state = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        data = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        state.update(f"\n{name} {weight.dtype} {list(weight.shape)} ".encode())
        state.update(data.numpy().data)
    return state.hexdigest()


def refuse(cache: DynamicCache, layout: Layout) -> None:
    """Raises UnfitCache unless ``cache`` is one sequence of that layout, every token of it kept."""
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else f"a {type(cache).__name__}"
        raise UnfitCache(f"only a plain DynamicCache can be saved, this is {kind}")
    if other := {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}:
        raise UnfitCache(f"only layers that keep every token can be saved, not {', '.join(sorted(other))}")
    length = cache.get_seq_length()
    if length and len(cache.layers) != layout.layers:
        raise UnfitCache(f"the layout has {layout.layers} layers, the cache {len(cache.layers)}")
    wanted, dtype = (1, layout.heads, length, layout.head_size), getattr(torch, layout.dtype)
    for number, layer in enumerate(cache if length else ()):
        for states in layer[:2]:
            if states is None or tuple(states.shape) != wanted or states.dtype != dtype:
                found = "nothing" if states is None else f"{list(states.shape)} of {states.dtype}"
                raise UnfitCache(f"layer {number} holds {found}, the layout says {list(wanted)} of {dtype}")
