import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_text.stop_strings import StopStrings


def by_search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule written plainly: the first character at which a stop string is complete; the longest one there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    watch = StopStrings(stops, include)
    shown = ""
    for piece in pieces:
        visible, stop = watch.push(piece)
        shown += visible
        if stop is not None:
            return shown, stop
    return shown + watch.finish(), None


small = st.text(alphabet="ab", min_size=1, max_size=5)


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(small, max_size=4),
    include=st.booleans(),
)
def test_any_split_gives_what_a_search_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == by_search("".join(pieces), stops, include)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12), stops=st.lists(small, min_size=1, max_size=4))
def test_nothing_is_shown_that_a_stop_string_takes_back(pieces: list[str], stops: list[str]) -> None:
    expected, _ = by_search("".join(pieces), stops, include=False)
    watch, shown = StopStrings(stops), ""
    for piece in pieces:
        visible, stop = watch.push(piece)
        shown += visible
        assert expected.startswith(shown)
        if stop is not None:
            break


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    watch = StopStrings(["</answer>"])
    assert watch.push("so: <") == ("so: ", None)
    assert watch.push("/ans") == ("", None)
    assert watch.push("x") == ("</ansx", None)


@pytest.mark.parametrize(("include", "shown"), [(False, "one"), (True, "one\n\n")])
def test_a_stop_string_over_a_border_of_tokens(include: bool, shown: str) -> None:
    watch = StopStrings(["\n\n"], include)
    first, _ = watch.push("one\n")
    second, stop = watch.push("\ntwo")
    assert (first + second, stop) == (shown, "\n\n")


def test_no_stop_strings_pass_text_through() -> None:
    watch = StopStrings([])
    assert watch.push("any") == ("any", None)
    assert watch.finish() == ""
