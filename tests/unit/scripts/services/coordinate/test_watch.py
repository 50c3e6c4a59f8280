"""What the coordinator says of its replicas, and when it gives up."""

import asyncio

from local_server import answering

from draftsmith.scripts.services.coordinate.watch import AWAY, ReplicaWatch, answers

WHOLE = {"ingress": 2, "dispatcher": 1}


def test_what_changes_is_said_once():
    watch = ReplicaWatch(WHOLE)
    assert watch.look(WHOLE, 0) == []
    assert watch.look({"ingress": 1, "dispatcher": 1}, 2) == ["coordinator: 1 of 2 replicas of ingress run"]
    assert watch.look({"ingress": 1, "dispatcher": 1}, 4) == []
    assert watch.look(WHOLE, 6) == ["coordinator: 2 of 2 replicas of ingress run"]


def test_it_ends_where_a_deployment_stays_away_and_not_before():
    watch = ReplicaWatch(WHOLE)
    watch.look({"ingress": 2}, 0)
    assert watch.lost(AWAY - 1) == []
    watch.look(WHOLE, AWAY - 1)
    watch.look({"ingress": 1}, AWAY + 1)  # one ingress is enough to answer
    assert watch.lost(2 * AWAY) == []
    assert watch.lost(2 * AWAY + 1) == ["dispatcher"]


def test_a_controller_that_does_not_answer_says_nothing_of_the_replicas():
    watch = ReplicaWatch(WHOLE)
    assert watch.look(None, 0) == ["coordinator: Ray Serve's controller does not answer"]
    assert watch.look(None, AWAY) == [] and watch.lost(2 * AWAY) == []
    assert watch.look(WHOLE, 2 * AWAY) == ["coordinator: Ray Serve's controller answers again"]


def test_it_ends_where_neither_the_controller_nor_the_port_answers():
    watch = ReplicaWatch(WHOLE)
    watch.look(None, 0, answers=False)
    assert watch.lost(AWAY - 1) == []
    watch.look(None, AWAY - 1, answers=True)
    watch.look(None, AWAY, answers=False)
    assert watch.lost(2 * AWAY - 1) == []
    assert watch.lost(2 * AWAY) == ["ingress", "dispatcher"]


def test_a_deployment_that_was_away_stays_away_while_the_controller_is_silent():
    watch = ReplicaWatch(WHOLE)
    watch.look({"ingress": 2}, 0)
    watch.look(None, AWAY / 2)
    assert watch.lost(AWAY) == ["dispatcher"]


def test_whether_a_port_answers():
    async def ask() -> bool:
        async with answering(b"", "503 Service Unavailable") as url:
            return await asyncio.to_thread(answers, "127.0.0.1", int(url.rpartition(":")[2]))

    assert asyncio.run(ask())
    assert not answers("127.0.0.1", 9)
