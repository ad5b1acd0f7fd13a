"""The plan keeps its promises: every load ends once, held blocks are freed once, commits need all ranks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachenode.connectors.naming import Asked, Namer, Names
from cachenode.connectors.plan import Plan
from cachenode.connectors.work import Report, Work
from tests.cachenode.connectors.node_fake import FakeBlocks, FakeNode

BLOCK = 16
CHUNK = 4


class Bench:
    """A plan with its fakes and a clock moved by hand."""

    def __init__(self, ranks: int = 1, hold: int = 100) -> None:
        self.now = 0.0
        self.node, self.blocks = FakeNode(), FakeBlocks()
        self.plan = Plan(
            self.node,
            self.blocks,
            block_tokens=BLOCK,
            chunk_blocks=CHUNK,
            ranks=ranks,
            hold_blocks=hold,
            clock=lambda: self.now,
        )
        self.ranks = ranks

    def add(self, request: str, tokens: list[int], prompt: int | None = None) -> None:
        self.plan.add(request, names_of(tokens), len(tokens) if prompt is None else prompt)

    def copied(self, work: Work, failed: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """All ranks end the stores of a step."""
        jobs = [store.job for store in work.stores]
        self.plan.stored(Report(dict.fromkeys(jobs, self.ranks), {*failed}))

    def next(self) -> Work:
        """The step that computes, and the one behind it."""
        first, second = self.plan.step(), self.plan.step()
        return Work(second.session, first.loads + second.loads, first.stores + second.stores)

    def keep(self, tokens: list[int]) -> None:
        """The node holds all full blocks of these tokens."""
        self.add("keeper", tokens)
        full = len(tokens) // BLOCK
        self.plan.computed("keeper", full, list(range(900, 900 + full)))
        self.copied(self.next())
        self.plan.end("keeper", full, list(range(900, 900 + full)))


def names_of(tokens: list[int]) -> Names:
    names = Namer("m", BLOCK, None).names(Asked())
    assert isinstance(names, Names)
    names.extend(tokens)
    return names


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_a_prompt_is_stored_after_the_step_that_computes_it() -> None:
    bench = Bench()
    bench.add("r", tokens(70))
    assert bench.plan.wants("r", 4) == 4
    bench.plan.computed("r", 4, [7, 8, 9, 10])
    assert bench.blocks.held == 4
    assert not bench.plan.step().stores, "this step computes it, beside the copies"
    work = bench.plan.step()
    assert [store.blocks for store in work.stores] == [[7, 8, 9, 10]]
    assert bench.plan.pending
    bench.plan.end("r", 4, [7, 8, 9, 10])
    assert bench.blocks.held == 4, "sources stay held until they are copied"
    bench.copied(work)
    assert bench.blocks.held == 0
    assert not bench.plan.pending
    assert len(bench.node.committed) == 4
    bench.plan.check_integrity()


def test_chunks_of_a_prompt_are_stored_as_they_come_and_only_once() -> None:
    bench = Bench()
    bench.add("r", tokens(100))
    for full in (2, 2, 5, 6):
        if bench.plan.wants("r", full):
            bench.plan.computed("r", full, list(range(full)))
        bench.copied(bench.next())
    assert [ask for ask in bench.node.asked if ask[0] == "reserve"] == [
        ("reserve", 0, 2),
        ("reserve", 2, 3),
        ("reserve", 5, 1),
    ]


def test_a_node_that_comes_is_asked_once() -> None:
    bench = Bench()
    bench.node.session = ""
    bench.add("r", tokens(70))
    assert bench.plan.wants("r", 4) == 0
    bench.node.session = "s1"
    bench.plan.computed("r", 4, [7, 8, 9, 10])
    bench.copied(bench.next())
    assert bench.plan.wants("r", 4) == 0


def test_the_answer_waits_for_a_whole_chunk_or_the_end() -> None:
    bench = Bench()
    bench.add("r", tokens(12 * BLOCK), prompt=2 * BLOCK)
    bench.plan.computed("r", 2, list(range(2)))
    bench.copied(bench.next())
    assert [bench.plan.wants("r", full) for full in (2, 3, 4, 6)] == [0, 0, 4, 4]
    bench.plan.computed("r", 4, list(range(4)))
    bench.plan.end("r", 7, list(range(7)))
    bench.copied(bench.next())
    assert len(bench.node.committed) == 7


def test_the_last_token_is_left_to_compute() -> None:
    bench = Bench()
    bench.keep(tokens(64))
    bench.add("r", tokens(64))
    assert bench.plan.offer("r", 0, 64) == 3
    bench.add("q", tokens(65))
    assert bench.plan.offer("q", 0, 65) == 4
    assert bench.plan.offer("q", 3, 65) == 1
    assert bench.plan.offer("q", 4, 65) == 0


def test_a_load_is_handed_out_once_and_its_lease_given_back() -> None:
    bench = Bench(ranks=2)
    bench.node.held.clear()
    bench.add("k", tokens(64))
    bench.plan.computed("k", 4, [1, 2, 3, 4])
    bench.copied(bench.next())
    bench.add("r", tokens(70))
    assert bench.plan.offer("r", 1, 70) == 3
    bench.plan.load("r", 1, [21, 22, 23])
    assert bench.plan.awaited()
    (load,) = bench.plan.step().loads
    assert (load.request, load.first, load.blocks, len(load.pieces)) == ("r", 1, [21, 22, 23], 1)
    assert not bench.plan.step().loads
    assert bench.node.leases
    bench.plan.loaded("r")
    assert not bench.node.leases
    assert bench.plan.counts["blocks_loaded"] == 3
    bench.plan.computed("r", 4, [20, 21, 22, 23])
    assert bench.plan.wants("r", 4) == 0
    reserved = [ask for ask in bench.node.asked if ask[0] == "reserve"]
    assert reserved == [("reserve", 0, 4)], "what was loaded is not stored again"


def test_a_failed_load_is_not_offered_again() -> None:
    bench = Bench()
    bench.keep(tokens(64))
    bench.add("r", tokens(70))
    assert bench.plan.offer("r", 0, 70) == 4
    bench.plan.load("r", 0, [1, 2, 3, 4])
    bench.plan.step()
    bench.plan.bad({3, 99})
    bench.plan.loaded("r")
    assert bench.plan.counts["loads_failed"] == 1
    assert bench.plan.offer("r", 0, 70) == 0


def test_a_silent_node_costs_its_patience_and_late_answers_are_given_back() -> None:
    bench = Bench()
    bench.keep(tokens(64))
    bench.node.silent = True
    bench.add("r", tokens(70))
    bench.add("q", tokens(70, 1000))
    bench.plan.load("r", 0, [1, 2, 3, 4])
    bench.plan.computed("q", 4, [5, 6, 7, 8])
    work = bench.plan.step()
    assert not work.loads
    assert bench.plan.pending
    bench.now = 1.0
    work = bench.plan.step()
    assert [(load.blocks, load.pieces) for load in work.loads] == [([1, 2, 3, 4], [])]
    assert bench.blocks.held == 0
    assert not bench.plan.pending
    bench.node.speak()
    bench.plan.step()
    assert not bench.node.leases
    assert len(bench.node.aborted) == 4
    assert bench.plan.counts["answers_late"] == 2


def test_an_aborted_load_is_still_ended() -> None:
    bench = Bench()
    bench.keep(tokens(64))
    bench.add("r", tokens(70))
    bench.plan.load("r", 0, [1, 2, 3, 4])
    bench.plan.end("r", 4, [1, 2, 3, 4])
    assert not [ask for ask in bench.node.asked if ask[0] == "reserve"][1:], "promised is not computed"
    (load,) = bench.plan.step().loads
    assert (load.blocks, load.pieces) == ([], [])
    bench.plan.loaded("r")
    assert not bench.node.leases


def test_a_lost_node_frees_what_waits_and_keeps_what_is_copied() -> None:
    bench = Bench()
    bench.add("r", tokens(70))
    bench.plan.computed("r", 2, [1, 2])
    work = bench.next()
    bench.node.silent = True
    bench.plan.computed("r", 4, [1, 2, 3, 4])
    assert bench.blocks.held == 4
    bench.node.restart("")
    bench.plan.step()
    assert bench.blocks.held == 2
    assert bench.node.quieted == []
    bench.copied(work)
    assert bench.blocks.held == 0
    assert bench.node.committed == []
    bench.node.restart("s2")
    bench.plan.step()
    assert bench.node.quieted == ["s1"]
    assert bench.plan.wants("r", 4) == 4, "a new node is told everything"


def test_a_rank_that_fails_aborts_the_reservation() -> None:
    bench = Bench(ranks=2)
    bench.add("r", tokens(32))
    bench.plan.computed("r", 2, [1, 2])
    (store,) = bench.next().stores
    bench.plan.stored(Report({store.job: 1}, set()))
    assert bench.node.committed == []
    assert bench.blocks.held == 2
    bench.plan.stored(Report({store.job: 1}, {store.job}))
    assert bench.node.committed == []
    assert len(bench.node.aborted) == 2
    assert bench.blocks.held == 0


def test_what_exceeds_the_hold_is_stored_later_or_counted() -> None:
    bench = Bench(hold=3)
    bench.add("r", tokens(96))
    bench.plan.computed("r", 6, list(range(6)))
    work = bench.next()
    assert bench.blocks.held == 3
    bench.plan.computed("r", 6, list(range(6)))
    bench.copied(work)
    bench.plan.end("r", 6, list(range(6)))
    bench.copied(bench.next())
    assert len(bench.node.committed) == 6
    assert bench.plan.counts["blocks_not_stored"] == 0
    bench.add("q", tokens(96, 500))
    bench.plan.end("q", 6, list(range(6)))
    assert bench.plan.counts["blocks_not_stored"] == 3


def test_a_full_node_gets_the_longest_prefix_and_nothing_behind() -> None:
    bench = Bench()
    bench.node.room = 2
    bench.add("r", tokens(96))
    bench.plan.computed("r", 3, list(range(3)))
    work = bench.next()
    assert [store.blocks for store in work.stores] == [[0, 1]]
    assert bench.blocks.held == 2
    assert bench.plan.wants("r", 6) == 0
    bench.copied(work)


class Machine(RuleBasedStateMachine):
    """Requests, steps, lost nodes and failures in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(ranks=2, hold=12)
        self.plan, self.node = self.bench.plan, self.bench.node
        self.live: dict[str, int] = {}
        self.loading: set[str] = set()
        self.promised: set[str] = set()
        self.jobs: dict[int, int] = {}
        self.names = 0
        self.lives = 1

    @rule(start=st.sampled_from([0, 5000]), length=st.integers(1, 140))
    def arrive(self, start: int, length: int) -> None:
        self.names += 1
        request = f"r{self.names}"
        self.bench.add(request, tokens(length, start))
        self.live[request] = length
        if offered := self.plan.offer(request, 0, length):
            assert offered * BLOCK < length
            self.plan.load(request, 0, [self.names * 100 + i for i in range(offered)])
            self.promised.add(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.floats(0, 1))
    def compute(self, data: st.DataObject, share: float) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        if request in self.promised | self.loading:
            return
        full = int(self.live[request] * share) // BLOCK
        if wanted := self.plan.wants(request, full):
            self.plan.computed(request, wanted, list(range(wanted)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        full = self.live.pop(request) // BLOCK
        self.plan.end(request, full, list(range(full)))

    @rule(ahead=st.sampled_from([0.0, 0.3, 0.6]))
    def step(self, ahead: float) -> None:
        self.bench.now += ahead
        work = self.plan.step()
        for load in work.loads:
            assert load.request in self.promised, "handed once"
            self.promised.discard(load.request)
            self.loading.add(load.request)
        for store in work.stores:
            assert store.job not in self.jobs
            self.jobs[store.job] = 2

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), bad=st.booleans())
    def end_load(self, data: st.DataObject, bad: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.discard(request)
        if bad:
            self.plan.bad({int(request[1:]) * 100})
        self.plan.loaded(request)

    @precondition(lambda self: any(self.jobs.values()))
    @rule(data=st.data(), failed=st.booleans())
    def end_store(self, data: st.DataObject, failed: bool) -> None:
        job = data.draw(st.sampled_from(sorted(job for job, left in self.jobs.items() if left)))
        self.jobs[job] -= 1
        self.plan.stored(Report({job: 1}, {job} if failed else set()))

    @rule()
    def silence(self) -> None:
        self.node.silent = True

    @rule()
    def speak(self) -> None:
        self.node.speak()

    @rule(away=st.booleans())
    def restart(self, away: bool) -> None:
        self.lives += 1
        self.node.restart("" if away else f"s{self.lives}")

    @invariant()
    def consistent(self) -> None:
        self.plan.check_integrity()
        assert self.bench.blocks.held <= 12

    def teardown(self) -> None:
        self.node.speak()
        self.step(0.0)
        self.step(0.0)
        self.step(5.0)
        assert not self.promised
        for job, left in self.jobs.items():
            self.plan.stored(Report({job: left}, set()) if left else Report({}, set()))
        for request in sorted(self.loading):
            self.plan.loaded(request)
        self.plan.step()
        assert self.bench.blocks.held == 0
        assert not self.plan.pending
        assert not self.node.leases
        assert not self.node.open
        assert set(self.node.quieted) <= {f"s{n}" for n in range(1, self.lives + 1)}


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
