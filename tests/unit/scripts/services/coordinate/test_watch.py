"""What the coordinator says of its replicas, and when it gives up."""

from draftsmith.scripts.services.coordinate.watch import AWAY, Watch

WHOLE = {"ingress": 2, "dispatcher": 1}


def test_what_changes_is_said_once():
    watch = Watch(WHOLE)
    assert watch.look(WHOLE, 0) == []
    assert watch.look({"ingress": 1, "dispatcher": 1}, 2) == ["coordinator: 1 of 2 replicas of ingress run"]
    assert watch.look({"ingress": 1, "dispatcher": 1}, 4) == []
    assert watch.look(WHOLE, 6) == ["coordinator: 2 of 2 replicas of ingress run"]


def test_it_ends_where_a_deployment_stays_away_and_not_before():
    watch = Watch(WHOLE)
    watch.look({"ingress": 2}, 0)
    assert watch.lost(AWAY - 1) == []
    watch.look(WHOLE, AWAY - 1)
    watch.look({"ingress": 1}, AWAY + 1)  # one ingress is enough to answer
    assert watch.lost(2 * AWAY) == []
    assert watch.lost(2 * AWAY + 1) == ["dispatcher"]


def test_where_nobody_says_what_runs_nothing_does():
    watch = Watch(WHOLE)
    assert len(watch.look(None, 0)) == 2
    assert watch.lost(AWAY) == ["ingress", "dispatcher"]
