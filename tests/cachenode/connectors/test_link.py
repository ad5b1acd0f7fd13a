"""The connection is looked after while the engine is idle, and no reply is lost between two threads."""

from cachenode.connectors.link import IDLE_S, Link
from cachenode.wire import Done, Reply
from tests.cachenode.connectors.node_fake import FakeNode


class FakeClient(FakeNode):
    def __init__(self) -> None:
        super().__init__()
        self.polls = 0
        self.incoming: list[Reply] = []
        self.closed = False
        self.forgotten = 0

    def poll(self) -> list[Reply]:
        self.polls += 1
        replies, self.incoming = self.incoming, []
        return replies

    def wait(self, ticket: int, seconds: float) -> Reply | None:
        return next((reply for reply in self.incoming if reply.id == ticket), None)

    def forget(self) -> None:
        self.forgotten += 1

    def close(self) -> None:
        self.closed = True


def test_an_idle_link_polls_and_keeps_the_replies() -> None:
    now = 0.0
    client = FakeClient()
    link = Link(client, lambda: now)
    client.incoming = [Done(1, "b")]
    link.poll_idle()
    assert client.polls == 0, "somebody polled a moment ago"
    now = IDLE_S
    link.poll_idle()
    assert client.polls == 1
    client.incoming = [Done(2, "b")]
    assert [reply.id for reply in link.poll()] == [1, 2]
    assert link.poll() == []


def test_waiting_ends_with_the_reply_or_the_time() -> None:
    client = FakeClient()
    link = Link(client, lambda: 0.0)
    client.incoming = [Done(4, "b")]
    assert [reply.id for reply in link.wait_for([3, 4], 0.002)] == [4]
    assert link.wait_for([], 0.002) == []


def test_a_closed_link_ends_its_thread() -> None:
    client = FakeClient()
    link = Link(client, lambda: 0.0)
    link.start()
    link.forget()
    link.close()
    assert client.closed
    assert client.forgotten == 1
