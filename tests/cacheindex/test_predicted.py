"""Predicted entries against a model, and their bounds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from index_fakes import keys_of

from cacheindex.predicted import Predicted

STEMS = [keys_of([stem] * 16 * 6) for stem in range(2)]
PROMPTS = [keys_of([stem] * 16 * cut + [9] * 16 * (6 - cut)) for stem in range(2) for cut in range(1, 7)]
PROMPT = st.sampled_from(PROMPTS).flatmap(lambda keys: st.integers(0, 6).map(lambda end: keys[:end]))
WORKER = st.sampled_from("ab")


class PredictedMachine(RuleBasedStateMachine):
    """Tickets in a plain dictionary say the same."""

    tickets: Bundle[int] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.predicted = Predicted(max_keys=1000)
        self.model: dict[int, tuple[str, list[bytes], float]] = {}
        self.now = 0.0

    @rule(target=tickets, worker=WORKER, keys=PROMPT, ahead=st.integers(1, 9))
    def put(self, worker: str, keys: list[bytes], ahead: int) -> int:
        ticket = self.predicted.put(worker, keys, self.now + ahead)
        self.model[ticket] = (worker, keys, self.now + ahead)
        return ticket

    @rule(ticket=tickets, ahead=st.integers(-2, 9))
    def confirm(self, ticket: int, ahead: int) -> None:
        self._age()
        assert self.predicted.confirm(ticket, self.now + ahead) == (ticket in self.model)
        if ticket in self.model:
            self.model[ticket] = (*self.model[ticket][:2], self.now + ahead)

    @rule(ticket=tickets)
    def drop(self, ticket: int) -> None:
        self._age()
        assert self.predicted.drop(ticket) == (ticket in self.model)
        self.model.pop(ticket, None)

    @rule(worker=WORKER)
    def drop_worker(self, worker: str) -> None:
        self._age()
        theirs = [ticket for ticket, known in self.model.items() if known[0] == worker]
        assert self.predicted.drop_worker(worker) == len(theirs)
        for ticket in theirs:
            del self.model[ticket]

    @rule(seconds=st.integers(0, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(keys=PROMPT)
    def match(self, keys: list[bytes]) -> None:
        self._age()
        expected: dict[str, int] = {}
        for worker, held, _ in self.model.values():
            reach = 0
            while reach < min(len(held), len(keys)) and held[reach] == keys[reach]:
                reach += 1
            if reach:
                expected[worker] = max(expected.get(worker, 0), 16 * reach)
        assert self.predicted.match(keys, self.now) == expected

    def _age(self) -> None:
        self.predicted.expire(self.now)
        self.model = {ticket: known for ticket, known in self.model.items() if known[2] > self.now}

    @invariant()
    def whole(self) -> None:
        self.predicted.check_integrity()


TestPredicted = PredictedMachine.TestCase
TestPredicted.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_twins_go_to_one_place() -> None:
    predicted, prompt = Predicted(), STEMS[0]
    ticket = predicted.put("a", prompt, deadline=5.0)
    assert predicted.match(prompt, now=4.9) == {"a": 96}
    assert predicted.confirm(ticket, deadline=8.0)
    assert predicted.match(prompt, now=7.0) == {"a": 96}
    assert predicted.match(prompt, now=8.0) == {}
    assert not predicted.drop(ticket)


def test_bounded_by_dropping_what_expires_first() -> None:
    predicted = Predicted(max_keys=10)
    first, second = predicted.put("a", STEMS[0], 9.0), predicted.put("b", STEMS[1][:4], 5.0)
    predicted.put("c", STEMS[0][:3], 7.0)
    assert predicted.dropped == 1
    assert not predicted.drop(second)
    assert predicted.drop(first)
    assert predicted.match(STEMS[0], 0.0) == {"c": 48}
    predicted.put("d", [*PROMPTS[0], *PROMPTS[1]], 9.0)
    assert predicted.keys_held <= 10
    predicted.check_integrity()


def test_many_confirmations_leave_nothing_behind() -> None:
    predicted = Predicted()
    ticket = predicted.put("a", STEMS[0], 1.0)
    for turn in range(1000):
        predicted.confirm(ticket, 2.0 + turn)
    predicted.check_integrity()
    assert len(predicted) == 1
    assert predicted.expire(2000.0) == 1
    assert len(predicted) == predicted.keys_held == 0
