import logging

import pytest
from pagefleet_protocol.printable import escape_control
from pagefleet_protocol.settings.log import LineFormatter, log_level, set_up_logging


def test_what_a_client_sent_cannot_forge_a_line() -> None:
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "id %s", ("a\r\nERROR x\x1b[31m\u2028\x9b",), None)
    line = LineFormatter("server").format(record)
    assert line.endswith("INFO server: id a\\r\\nERROR x\\x1b[31m\\u2028\\x9b")
    assert len(line.splitlines()) == 1


def test_plain_text_is_left_alone() -> None:
    assert escape_control("grüße 你好 😀") == "grüße 你好 😀"


def test_logging_goes_to_stderr_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_LOG_LEVEL", "warning")
    packages = ("pagefleet_example", "pagefleet_other")
    set_up_logging("core", *packages)
    set_up_logging("core", *packages)
    try:
        for package in packages:
            logging.getLogger(f"{package}.x").warning("once from %s", package)
            logging.getLogger(f"{package}.x").info("not at all")
        told = capsys.readouterr().err
        assert [line.partition("core: ")[2] for line in told.splitlines()] == [f"once from {one}" for one in packages]
    finally:
        for package in packages:
            logger = logging.getLogger(package)
            logger.handlers.clear()
            logger.propagate = True
            logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("environment", "level"),
    [({}, "INFO"), ({"PAGEFLEET_LOG_LEVEL": ""}, "INFO"), ({"PAGEFLEET_LOG_LEVEL": "debug"}, "DEBUG")],
)
def test_levels(environment: dict[str, str], level: str) -> None:
    assert log_level(environment) == level


def test_an_unknown_level_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="PAGEFLEET_LOG_LEVEL is 'CHATTY': give one of DEBUG, INFO"):
        log_level({"PAGEFLEET_LOG_LEVEL": "chatty"})
