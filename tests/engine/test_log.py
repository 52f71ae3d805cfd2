import logging

import pytest
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.log import LineFormatter, escape_control, set_up_logging


def test_what_a_client_sent_cannot_forge_a_line() -> None:
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "id %s", ("a\r\nERROR x\x1b[31m\u2028\x9b",), None)
    line = LineFormatter("server").format(record)
    assert line.endswith("INFO server: id a\\r\\nERROR x\\x1b[31m\\u2028\\x9b")
    assert len(line.splitlines()) == 1


def test_plain_text_is_left_alone() -> None:
    assert escape_control("grüße 你好 😀") == "grüße 你好 😀"


def test_logging_goes_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("core", "warning")
    set_up_logging("core", "warning")
    packages = ("pagefleet_engine", "pagefleet_kv")
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


def test_an_unknown_level_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="give one of DEBUG, INFO"):
        set_up_logging("core", "chatty")
