"""The page of an evaluation comes from a plug-in; an evaluation does without it."""

import logging

from ludic import plugins
from ludic.cli.eval.results import PAGE, write_page


def test_the_page_is_what_the_report_of_a_plug_in_returns(tmp_path, monkeypatch):
    class Report(plugins.Point):
        def load(self):
            return lambda folder: f"page of {folder.name}"

    monkeypatch.setattr(plugins, "points", lambda group: [Report("ludic.reports", "page", "theirs:page", "theirs")])
    assert write_page(tmp_path) == tmp_path / PAGE
    assert (tmp_path / PAGE).read_text() == f"page of {tmp_path.name}"


def test_without_the_plug_in_the_extra_is_named_and_nothing_is_written(tmp_path, monkeypatch, caplog):
    gone = plugins.Point("ludic.reports", "page", "ludic_nowhere.export:page", "ludic-rl")
    monkeypatch.setattr(plugins, "points", lambda group: [gone])
    with caplog.at_level(logging.WARNING):
        assert write_page(tmp_path) is None
    assert "ludic_nowhere, which is not installed" in caplog.text and "[nowhere]" in caplog.text
    assert not (tmp_path / PAGE).exists()


def test_without_any_report_an_evaluation_has_no_page(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "points", lambda group: [])
    assert write_page(tmp_path) is None
