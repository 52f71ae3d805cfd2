"""The header that aims a transfer: signed for one engine, and refused in every other form."""

from __future__ import annotations

import pytest
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_handoff import KvHandoffError, KvTransfer, decode_kv_transfer, read_kv_fault

KEY = FleetKey(b"k" * 32)
OWN = "a" * 32
PREFILL = KvTransfer("prefill", "1" * 32, "b" * 32)
DECODE = KvTransfer("decode", "1" * 32, "b" * 32, "[::1]:8102", "fail")


@pytest.mark.parametrize("transfer", [PREFILL, DECODE])
def test_a_header_says_what_was_put_in(transfer: KvTransfer) -> None:
    assert decode_kv_transfer(transfer.encode(KEY, OWN), KEY, OWN) == transfer


def test_another_key_is_refused() -> None:
    with pytest.raises(KvHandoffError, match="not from a router of this fleet"):
        decode_kv_transfer(DECODE.encode(FleetKey(b"x" * 32), OWN), KEY, OWN)


def test_a_header_for_another_incarnation_is_refused() -> None:
    with pytest.raises(KvHandoffError, match="another engine"):
        decode_kv_transfer(DECODE.encode(KEY, "c" * 32), KEY, OWN)


@pytest.mark.parametrize("changed", ["10.0.0.1:8102", "[::1]:8103"])
def test_a_changed_address_is_refused(changed: str) -> None:
    value = DECODE.encode(KEY, OWN).replace("[::1]:8102", changed)
    with pytest.raises(KvHandoffError):
        decode_kv_transfer(value, KEY, OWN)


@pytest.mark.parametrize("value", ["", "leg=decode", "x" * 4096, "leg=both;" + DECODE.encode(KEY, OWN)])
def test_what_is_no_such_header_is_refused(value: str) -> None:
    with pytest.raises(KvHandoffError):
        decode_kv_transfer(value, KEY, OWN)


def test_an_address_belongs_to_the_decode_leg_alone() -> None:
    for wrong in (KvTransfer("decode", "1" * 32, "b" * 32), KvTransfer("prefill", "1" * 32, "b" * 32, "h:1")):
        with pytest.raises(KvHandoffError, match="wrong leg"):
            decode_kv_transfer(wrong.encode(KEY, OWN), KEY, OWN)


def test_a_fault_of_a_later_version_is_none() -> None:
    assert read_kv_fault("unknown_peer") == "unknown_peer"
    assert read_kv_fault("struck_by_lightning") is None
    assert read_kv_fault("") is None
