"""Whether a replay ends: rings of messages, groups in different orders, streams."""

import pytest

from bench.step_study.recording import Group, RecordedCall, Recording
from bench.traces.progress import check_ends
from commengine import UsageError

PAIR = (Group("a", (0, 1)), Group("b", (0, 1)))
RING = (Group("ring", (0, 1, 2)),)


def call(operation, at, group=0, *, root=None, peers=(), stream=0, waited=None):
    buffers = ((8, False),) * (2 if operation == "sendrecv" else 1)
    return RecordedCall(
        operation, None, root, peers, "float32", (2,), 8, buffers, group, stream, at, at, at + 1, waited, waited
    )


def exchange(at, to, source):
    return call("sendrecv", at, root=to, peers=(to, source))


def test_what_ends():
    check_ends(Recording(PAIR, ((call("all_reduce", 0), call("barrier", 1, 1)),) * 2))
    check_ends(Recording(RING, tuple((exchange(0, (r + 1) % 3, (r - 1) % 3),) * 1 for r in range(3))))
    # One half of rank 1's exchange is done before the other half can begin.
    half = (
        (call("recv", 0, root=2), call("send", 1, root=1)), (exchange(0, 2, 0),),
        (call("recv", 0, root=1), call("send", 1, root=0)),
    )  # fmt: skip
    check_ends(Recording(RING, half))
    # Groups in different orders, but one of the two calls is on a stream.
    one = (call("all_reduce", 0, stream=1, waited=5), call("all_reduce", 1, 1))
    other = (call("all_reduce", 0, 1), call("all_reduce", 1, stream=1, waited=5))
    check_ends(Recording(PAIR, (one, other)))
    check_ends(Recording(PAIR, ((call("all_reduce", 0, stream=1),),) * 2))  # nobody waits until the replay's end
    check_ends(Recording((), ((), ())))
    # A stage begins to receive, and sends meanwhile: a stream of messages alone has no order.
    early = (
        call("recv", 0, root=1, stream=1, waited=5), call("send", 1, root=1, stream=1),
        call("recv", 0, root=1, stream=1, waited=6),
    )  # fmt: skip
    late = (call("recv", 0, root=0, stream=1, waited=1), call("send", 2, root=0, stream=1),
            call("send", 3, root=0, stream=1))  # fmt: skip
    check_ends(Recording(PAIR[:1], (early, late)))
    with pytest.raises(UsageError, match="rank 0 in recv of 8 bytes"):  # in order it would not end
        check_ends(Recording(PAIR[:1], ((*early, call("barrier", 7, stream=1)), (*late, call("barrier", 7, stream=1)))))


@pytest.mark.parametrize(
    ("groups", "calls", "message"),
    [
        (
            PAIR,
            ((call("all_reduce", 0), call("barrier", 1, 1)), (call("barrier", 0, 1), call("all_reduce", 1))),
            "rank 0 in all_reduce of 8 bytes, call 0, group 'a', rank 1 in barrier of 8 bytes, call 0, group 'b'",
        ),
        (  # a ring in which all send first
            RING,
            tuple((call("send", 0, root=(r + 1) % 3), call("recv", 1, root=(r - 1) % 3)) for r in range(3)),
            "rank 0 in send .*, rank 1 in send",
        ),
        (  # it waits for the call on the stream before it enters the other rank's
            PAIR,
            (
                (call("all_reduce", 0, stream=1, waited=0.5), call("all_reduce", 1, 1)),
                (call("all_reduce", 0, 1), call("all_reduce", 1, stream=1, waited=5)),
            ),
            "rank 0 in all_reduce of 8 bytes, call 0, group 'a'",
        ),
        (PAIR, ((call("all_reduce", 0),), (call("send", 0, root=0),)), "ranks wait for each other"),
    ],
)
def test_what_does_not_end_is_named(groups, calls, message):
    with pytest.raises(UsageError, match=message):
        check_ends(Recording(groups, calls))
