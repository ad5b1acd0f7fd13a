"""Who holds which key: an in-memory table with one writer and lock-free readers.

Keys map to *interned* sets of slots: runs of keys share their holders, so an entry stays small
however many slots there are, and forgetting a holder rewrites sets, not entries. ``store``,
``remove``, ``clear``, ``forget``, ``held_by``, ``sweep`` and ``check_integrity`` belong to the one writer
thread. ``match``, ``touch``, ``mark``, ``removed_since`` and ``stats`` may be called from any
thread: they change nothing the writer owns and look only single entries up, so they see each key as
it was before or after a change, never half of one.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cacheindex.events import Tier
from cacheindex.keys import BLOCK_TOKENS

ENTRY_BYTES = 256
"""Memory charged for one key: the key, its place in the ordered map, its share of growth."""

SET_BYTES = 512
"""Memory charged for one distinct set of slots, and again for each slot in it."""

HISTORY = 131_072
"""Removals remembered for ``removed_since``."""

_ALL = b""  # In the history: everything this slot held.


class Slot(msgspec.Struct, frozen=True, cache_hash=True):
    """One place of one holder. ``stride`` is the tokens of its blocks: it holds the keys of whole
    blocks only, so with 32 the keys at indices 1, 3, 5 … of a prompt. ``group`` tells apart the KV
    groups of a hybrid model, each of which a prefix needs."""

    holder: str
    tier: Tier
    layout: str = ""
    stride: int = BLOCK_TOKENS
    group: int = 0


class TableStats(msgspec.Struct, frozen=True):
    """``entries`` counts keys, ``dead`` those of them nobody holds any more (swept soon),
    ``lost`` keys pushed out because the table was full since it was made."""

    entries: int
    dead: int
    sets: int
    bytes_used: int
    bytes_limit: int
    lost: int


class _Holders:
    """One interned set of slots; ``by_stride`` is replaced as a whole, never changed in place."""

    __slots__ = ("by_stride", "count", "slots")

    def __init__(self, slots: frozenset[Slot]) -> None:
        self.count = 0
        self.become(slots)

    def become(self, slots: frozenset[Slot]) -> None:
        strides = {slot.stride for slot in slots}
        self.slots = slots
        self.by_stride = {
            stride: frozenset(slot for slot in slots if slot.stride == stride) for stride in strides
        }

    @property
    def cost(self) -> int:
        return SET_BYTES * (1 + len(self.slots))


_NOBODY: frozenset[Slot] = frozenset()


class Table:
    """See the module. ``max_bytes`` is a fixed budget: when it is reached the keys stored or
    touched longest ago go, and the loss is counted."""

    def __init__(self, max_bytes: int, history: int = HISTORY) -> None:
        if max_bytes < 16 * SET_BYTES:
            raise ValueError(f"a table needs at least {16 * SET_BYTES} bytes, got {max_bytes}")
        self._limit = max_bytes
        self._history_limit = history
        self._entries: OrderedDict[bytes, _Holders] = OrderedDict()
        self._interned: dict[frozenset[Slot], _Holders] = {}
        self._sets: set[_Holders] = set()
        self._slots: dict[Slot, Slot] = {}
        self._strides: tuple[int, ...] = ()
        self._groups: dict[tuple[str, str, str], tuple[Slot, ...]] = {}
        self._set_bytes = 0
        self._dead = 0
        self._lost = 0
        self._unswept = 0
        self._touched: deque[Sequence[bytes]] = deque(maxlen=256)
        self._serial = 0
        self._overrun = 0
        self._gone: dict[Slot, dict[bytes, int]] = {}
        self._order: deque[tuple[int, Slot, bytes]] = deque()

    # ---- readers, any thread ----

    def match(self, keys: Sequence[bytes]) -> dict[Slot, int]:
        """Tokens of this prompt that each slot holds from its start without a hole, rounded down
        to the slot's stride. Slots that hold none are left out, unless another group of the same
        holder, tier and layout holds some: then they are there with 0, for ``by_holder``."""
        found: dict[Slot, int] = {}
        for stride in self._strides:
            self._walk(keys, stride, found)
        groups = self._groups
        if groups:
            for slot in list(found):
                for other in groups.get((slot.holder, slot.tier, slot.layout), ()):
                    found.setdefault(other, 0)
        return found

    def _walk(self, keys: Sequence[bytes], stride: int, found: dict[Slot, int]) -> None:
        step = stride // BLOCK_TOKENS
        part = keys if step == 1 else keys[step - 1 :: step]
        alive: frozenset[Slot] | None = None
        passed: set[_Holders | None] = set()  # Sets that hold for everybody who is still alive.
        before: object = self
        for index, holders in enumerate(map(self._entries.get, part)):
            if holders is before or holders in passed:
                continue
            before = holders
            slots = _NOBODY if holders is None else holders.by_stride.get(stride, _NOBODY)
            still = slots if alive is None else alive & slots
            if alive is None or len(still) != len(alive):
                for slot in (alive or _NOBODY) - still:
                    found[slot] = index * stride
                if not still:
                    return
                alive = still
                passed.clear()
            passed.add(holders)
        for slot in alive or ():
            found[slot] = len(part) * stride

    def touch(self, keys: Sequence[bytes]) -> None:
        """These keys were useful: keep them longer than others when the table is full. A hint,
        taken at the writer's next turn; under pressure some are dropped."""
        self._touched.append(keys)

    def mark(self) -> int:
        """A point in the table's history, for ``removed_since``."""
        return self._serial

    def removed_since(self, slot: Slot, keys: Iterable[bytes], mark: int) -> bool:
        """Whether any of these keys left this slot after ``mark``. True as well when the history
        no longer reaches back that far: an eviction cannot be ruled out then."""
        gone = self._gone.get(slot)
        if gone is not None and (gone.get(_ALL, 0) > mark or any(gone.get(key, 0) > mark for key in keys)):
            return True
        return mark < self._overrun  # Read last: the writer may have dropped what was looked for.

    def stats(self) -> TableStats:
        """Figures for metrics; each is current, together they may be a moment apart."""
        return TableStats(
            entries=len(self._entries),
            dead=self._dead,
            sets=len(self._sets),
            bytes_used=self._used(),
            bytes_limit=self._limit,
            lost=self._lost,
        )

    # ---- the writer ----

    def store(self, slot: Slot, keys: Sequence[bytes]) -> None:
        """``slot`` holds ``keys``. Storing what it holds already only makes it younger."""
        slot = self._known(slot)
        moves: dict[_Holders | None, _Holders] = {}
        entries = self._entries
        # The last key first: when the table is full, ends of prompts go before their beginnings.
        for key in reversed(keys):
            old = entries.get(key)
            new = moves.get(old)
            if new is None:
                new = moves[old] = self._intern((old.slots if old else _NOBODY) | {slot})
            if new is not old:
                self._put(key, old, new)
            entries.move_to_end(key)
        self._take_touched()
        self._shrink()

    def remove(self, slot: Slot, keys: Iterable[bytes]) -> None:
        """``slot`` no longer holds ``keys``; keys it did not hold are passed over."""
        known = self._slots.get(slot)
        if known is None:
            return
        moves: dict[_Holders, _Holders | None] = {}
        for key in keys:
            old = self._entries.get(key)
            if old is None or known not in old.slots:
                continue
            self._note(known, key)
            if old not in moves:
                rest = old.slots - {known}
                moves[old] = self._intern(rest) if rest else None
            new = moves[old]
            if new is not None:
                self._put(key, old, new)
            else:
                del self._entries[key]
                self._release(old)
        self._shrink()

    def clear(self, slot: Slot) -> None:
        """``slot`` holds nothing any more. Costs as many steps as there are distinct sets."""
        known = self._slots.get(slot)
        if known is not None:
            self._note(known, _ALL)
            self._withdraw(frozenset((known,)))

    def forget(self, holder: str) -> None:
        """Nothing this holder said is believed any more. Costs as many steps as there are
        distinct sets, not keys; the space comes back with ``sweep``."""
        leaving = frozenset(slot for slot in self._slots if slot.holder == holder)
        for slot in leaving:
            self._note(slot, _ALL)
        self._withdraw(leaving)
        for slot in leaving:
            del self._slots[slot]
        self._survey()

    def held_by(self, holder: str) -> dict[Slot, int]:
        """How many keys each slot of this holder has. Costs as many steps as there are distinct sets."""
        held = {slot: 0 for slot in self._slots if slot.holder == holder}
        for holders in self._sets:
            for slot in held:
                if slot in holders.slots:
                    held[slot] += holders.count
        return held

    def sweep(self, steps: int) -> bool:
        """Free entries that nobody holds, looking at no more than ``steps`` entries; True while
        there is more to do. Readers never miss a live key meanwhile."""
        self._take_touched()
        entries = self._entries
        while self._unswept > 0 and steps > 0 and self._dead > 0:
            key = next(iter(entries))
            holders = entries[key]
            if holders.slots:
                entries.move_to_end(key)
            else:
                del entries[key]
                self._release(holders)
            self._unswept -= 1
            steps -= 1
        if self._dead == 0 or self._unswept <= 0:
            self._unswept = len(entries) if self._dead else 0
        return self._unswept > 0

    def check_integrity(self) -> None:
        """Raises AssertionError where the table contradicts itself. Walks everything: for tests
        and for people."""
        counted: dict[_Holders, int] = {}
        for holders in self._entries.values():
            counted[holders] = counted.get(holders, 0) + 1
        _check(set(counted) == self._sets, "a set without entries, or an entry without a set")
        for holders, count in counted.items():
            _check(holders.count == count, "a set's count of its keys")
            _check(holders.slots <= set(self._slots), "a set names a slot that is forgotten")
            parts = frozenset(slot for part in holders.by_stride.values() for slot in part)
            _check(parts == holders.slots, "slots by stride are not the slots")
        dead = sum(count for holders, count in counted.items() if not holders.slots)
        _check(dead == self._dead, "the count of dead keys")
        for slots, holders in self._interned.items():
            _check(holders.slots == slots and holders in self._sets, "an interned set is stale")
        _check(self._set_bytes == sum(holders.cost for holders in self._sets), "bytes of sets")
        _check(self._used() <= self._limit, "more bytes than the budget")
        _check(len(self._order) <= self._history_limit, "more history than allowed")
        for gone in self._gone.values():
            _check(all(self._overrun < at <= self._serial for at in gone.values()), "history's order")

    # ---- inside ----

    def _used(self) -> int:
        return len(self._entries) * ENTRY_BYTES + self._set_bytes

    def _known(self, slot: Slot) -> Slot:
        known = self._slots.get(slot)
        if known is None:
            if slot.stride <= 0 or slot.stride % BLOCK_TOKENS:
                raise ValueError(f"a stride must be a multiple of {BLOCK_TOKENS}, got {slot.stride}")
            known = self._slots[slot] = slot
            self._survey()
        return known

    def _survey(self) -> None:
        """Anew which strides there are, and which slots are groups of one another."""
        together: dict[tuple[str, str, str], list[Slot]] = {}
        for slot in self._slots:
            together.setdefault((slot.holder, slot.tier, slot.layout), []).append(slot)
        self._groups = {
            place: tuple(slots)
            for place, slots in together.items()
            if len({slot.group for slot in slots}) > 1
        }
        self._strides = tuple(sorted({slot.stride for slot in self._slots}))

    def _intern(self, slots: frozenset[Slot]) -> _Holders:
        holders = self._interned.get(slots)
        if holders is None:
            holders = self._interned[slots] = _Holders(slots)
        return holders

    def _put(self, key: bytes, old: _Holders | None, new: _Holders) -> None:
        if new.count == 0:
            self._sets.add(new)
            self._set_bytes += new.cost
        new.count += 1
        self._entries[key] = new
        if old is not None:
            self._release(old)

    def _release(self, holders: _Holders) -> None:
        holders.count -= 1
        if not holders.slots:
            self._dead -= 1
        if holders.count == 0:
            self._sets.discard(holders)
            self._set_bytes -= holders.cost
            if self._interned.get(holders.slots) is holders:
                del self._interned[holders.slots]

    def _withdraw(self, leaving: frozenset[Slot]) -> None:
        for holders in list(self._sets):
            if holders.slots.isdisjoint(leaving):
                continue
            if self._interned.get(holders.slots) is holders:
                del self._interned[holders.slots]
            self._set_bytes -= holders.cost
            holders.become(holders.slots - leaving)
            self._set_bytes += holders.cost
            if holders.slots:
                self._interned.setdefault(holders.slots, holders)
            else:
                self._dead += holders.count
                self._unswept = len(self._entries)

    def _take_touched(self) -> None:
        entries = self._entries
        for _ in range(len(self._touched)):
            for key in reversed(self._touched.popleft()):
                if key in entries:
                    entries.move_to_end(key)

    def _shrink(self) -> None:
        while self._used() > self._limit and self._entries:
            key, holders = self._entries.popitem(last=False)
            if holders.slots:
                self._lost += 1
                for slot in holders.slots:
                    self._note(slot, key)
            self._release(holders)

    def _note(self, slot: Slot, key: bytes) -> None:
        self._serial += 1
        self._gone.setdefault(slot, {})[key] = self._serial
        self._order.append((self._serial, slot, key))
        while len(self._order) > self._history_limit:
            serial, slot, key = self._order.popleft()
            self._overrun = serial
            gone = self._gone.get(slot)
            if gone is not None and gone.get(key) == serial:
                del gone[key]
                if not gone:
                    del self._gone[slot]


def by_holder(matches: Mapping[Slot, int]) -> dict[str, dict[Tier, int]]:
    """What ``match`` found, per holder and tier: the least over the groups of a layout (a prefix
    needs all of them), the most over layouts. Tiers and holders with nothing are left out."""
    layouts: dict[tuple[str, Tier, str], int] = {}
    for slot, tokens in matches.items():
        place = (slot.holder, slot.tier, slot.layout)
        layouts[place] = min(tokens, layouts.get(place, tokens))
    holders: dict[str, dict[Tier, int]] = {}
    for (holder, tier, _), tokens in layouts.items():
        if tokens > 0:
            tiers = holders.setdefault(holder, {})
            tiers[tier] = max(tokens, tiers.get(tier, 0))
    return holders


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"index table: wrong {what}")
