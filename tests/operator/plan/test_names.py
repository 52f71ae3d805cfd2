"""Names of children: DNS labels, short enough for a Job, and never those of another service."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from pagefleet_operator.plan.names import ChildNames, child_stem, names_of
from pagefleet_protocol.kube_names import DOTTED_SUFFIX, RESERVED_SUFFIXES
from pagefleet_protocol.resource_rules import MAX_NAME_LENGTH

from tests.operator.plan.kube_world import service

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
PART = "[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?"
RESERVED = re.compile(f".*({'|'.join(RESERVED_SUFFIXES)}|{DOTTED_SUFFIX})")
NAMES = st.from_regex(rf"[a-z]({PART})?(\.{PART}){{0,3}}", fullmatch=True).filter(
    lambda name: len(name) <= MAX_NAME_LENGTH and not RESERVED.fullmatch(name)
)


def all_names(name: str) -> list[str]:
    names = ChildNames(child_stem(name))
    roles = [names.part("prefill"), names.part("decode")]
    return [names.service, names.engine, names.router, names.model, names.openai, names.fleet,
            names.model_job("0123456789"), *roles]  # fmt: skip


@given(NAMES)
def test_children_have_names_that_kubernetes_takes(name: str) -> None:
    assert len(child_stem(name)) <= MAX_NAME_LENGTH
    for one in all_names(name):
        assert DNS_LABEL.fullmatch(one), one


@given(st.lists(NAMES, min_size=2, max_size=6, unique=True))
def test_no_two_services_share_a_name(names: list[str]) -> None:
    everything = [one for name in names for one in all_names(name)]
    assert len(everything) == len(set(everything))


def test_a_models_name_can_be_a_services() -> None:
    assert service("qwen2.5-7b").model_name == "qwen2.5-7b"
    assert names_of(service("qwen2.5-7b")).engine == "qwen2-5-7b-x5f5e975ce4-engine"
    assert names_of(service("qwen")).engine == "qwen-engine"
