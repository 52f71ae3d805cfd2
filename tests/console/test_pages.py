"""The console's files as a server sends them: types, tags, gzip, security headers, and no more than fits the budget."""

from __future__ import annotations

import gzip

import pytest
from pagefleet_console.pages import read_pages, wants_page

PAGES = read_pages()


def test_every_file_says_what_it_is_and_how_it_may_be_used() -> None:
    assert "/" in PAGES
    for path, page in PAGES.items():
        answer = page.answer()
        assert answer.status == 200
        assert answer.body == page.body
        assert answer.headers["content-type"].startswith(("text/html", "text/css", "text/javascript", "image/svg+xml"))
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"], path
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("accepted", ["gzip", "br, gzip;q=0.8", "*", "deflate, GZIP"])
def test_who_takes_gzip_gets_it(accepted: str) -> None:
    answer = PAGES["/"].answer(accept_encoding=accepted)
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(answer.body) == PAGES["/"].body


@pytest.mark.parametrize("accepted", [None, "", "identity", "gzip;q=0", "gzip; q=0.0", "x-gzipped"])
def test_who_does_not_take_gzip_gets_it_plain(accepted: str | None) -> None:
    answer = PAGES["/"].answer(accept_encoding=accepted)
    assert "content-encoding" not in answer.headers
    assert answer.body == PAGES["/"].body


def test_who_has_this_version_gets_nothing_again() -> None:
    page = PAGES["/"]
    for named in (page.etag, f"W/{page.etag}", f'"other", {page.etag}', "*"):
        answer = page.answer(if_none_match=named)
        assert (answer.status, answer.body) == (304, b"")
        assert answer.headers["etag"] == page.etag
    assert page.answer(if_none_match='"other"').status == 200


@pytest.mark.parametrize(
    ("accept", "browser"),
    [
        ("text/html,application/xhtml+xml,*/*;q=0.8", True),
        ("TEXT/HTML; q=1", True),
        ("*/*", False),
        ("application/json", False),
        (None, False),
    ],
)
def test_a_browser_is_told_from_a_program(accept: str | None, *, browser: bool) -> None:
    assert wants_page(accept) is browser


def test_all_of_it_is_small() -> None:
    assert sum(len(page.gzipped) for page in PAGES.values()) < 150_000
