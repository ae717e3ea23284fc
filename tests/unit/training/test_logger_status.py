"""The status line of a console logger: under the live table, and between printed steps."""

import io

from rich.console import Console

from ludic.training.loggers import PrintLogger, RichLiveLogger


def test_printed_steps_are_followed_by_the_status_every_few_steps():
    stream, asked = io.StringIO(), iter(range(100))
    logger = PrintLogger(stream=stream, status=lambda: f"status {next(asked)}", status_every=2)
    for step in (1, 2, 3, 4):
        logger.log(step, {"train/loss": 1.0})
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "status" in line] == ["[trainer] status 0", "[trainer] status 1"]
    assert [index for index, line in enumerate(lines) if "status" in line] == [1, 4], "after steps 1 and 3"


def test_the_live_table_has_the_newest_status_under_it():
    stream, asked = io.StringIO(), iter(range(100))
    console = Console(file=stream, force_terminal=True, width=80)
    logger = RichLiveLogger(console=console, status=lambda: f"status {next(asked)}")
    logger.log(1, {"train/loss": 1.0})
    logger.log(2, {"train/loss": 1.0})
    logger.close()
    last = stream.getvalue().rpartition("step 2")[2]
    assert "status 1" in last and last.index("loss") < last.index("status 1")


def test_without_a_terminal_the_status_is_a_plain_line():
    stream = io.StringIO()
    logger = RichLiveLogger(console=Console(file=stream), status=lambda: "all is well")
    logger.log(1, {"train/loss": 1.0})
    assert stream.getvalue().splitlines()[-1] == "[trainer] all is well"
