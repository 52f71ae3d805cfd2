"""Invitations: good once, for one peer, for so long, and only so many."""

from __future__ import annotations

from pagefleet_kv.p2p.planes.shell import INVITATION_S, MAX_INVITATIONS, Invitations, Invited


class Clock:
    """Stands still until it is put forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_is_found_until_it_is_spent() -> None:
    invitations = Invitations(Clock())
    invitations.give(b"1", "d", b"secret")
    invitations.give(b"2", "d")
    for _ in range(2):  # to look is not to spend
        assert invitations.find(b"1") == Invited("d", b"secret", 100.0 + INVITATION_S)
    invitations.spend(b"1")
    invitations.spend(b"1")
    assert invitations.find(b"1") is None
    assert invitations.find(b"2") == Invited("d", b"", 100.0 + INVITATION_S)
    assert invitations.find(b"3") is None


def test_one_is_good_for_so_long() -> None:
    clock = Clock()
    invitations = Invitations(clock)
    invitations.give(b"1", "d")
    clock.now += INVITATION_S
    assert invitations.find(b"1") is not None
    clock.now += 0.001
    assert invitations.find(b"1") is None


def test_those_of_one_peer_are_taken_back() -> None:
    invitations = Invitations()
    for number, peer in ((b"1", "d"), (b"2", "e"), (b"3", "d")):
        invitations.give(number, peer)
    invitations.take_back("d")
    assert [invitations.find(number) is not None for number in (b"1", b"2", b"3")] == [False, True, False]


def test_the_oldest_of_too_many_is_taken_back() -> None:
    invitations = Invitations()
    for number in range(MAX_INVITATIONS + 1):
        invitations.give(number.to_bytes(2, "big"), "d")
    assert invitations.find(b"\x00\x00") is None
    assert all(invitations.find(number.to_bytes(2, "big")) for number in range(1, MAX_INVITATIONS + 1))
