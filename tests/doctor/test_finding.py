"""Printing of findings."""

from __future__ import annotations

import json

from primus_odc.doctor.finding import Finding, as_json, from_dict, table, unique

OK = Finding(check="memory", severity="ok", found="8 GiB free", details={"available_bytes": 2**33})
NOTE = Finding(check="host name", severity="note", found="does not resolve", setting="add it to /etc/hosts")
PROBLEM = Finding(check="configuration", severity="problem", found="lr is missing")


def test_table_names_severity_check_and_setting() -> None:
    assert table([OK, NOTE, PROBLEM]).splitlines() == [
        "ok       memory         8 GiB free",
        "note     host name      does not resolve",
        "                        -> add it to /etc/hosts",
        "problem  configuration  lr is missing",
        "1 problem, 1 note, 1 ok",
    ]


def test_long_and_several_lines_stay_in_their_column() -> None:
    lines = table([Finding(check="run", severity="problem", found="word " * 60 + "\nsecond line")]).splitlines()
    assert len(lines) > 3 and all(len(line) <= 140 for line in lines)
    assert lines[-2] == " " * len("problem  run  ") + "second line"


def test_json_holds_every_field_and_the_verdict() -> None:
    content = json.loads(as_json([OK, NOTE], 1.23456))
    assert (content["format"], content["ok"], content["seconds"]) == (1, True, 1.235)
    assert [from_dict(item) for item in content["findings"]] == [OK, NOTE]
    assert json.loads(as_json([NOTE, PROBLEM], 0.0))["ok"] is False


def test_a_problem_is_told_once_and_notes_are_kept() -> None:
    again = Finding(check="torch", severity="problem", found="lr is missing")
    other = Finding(check="GPUs", severity="note", found="does not resolve")
    assert unique([OK, NOTE, PROBLEM, other, again]) == [OK, NOTE, PROBLEM, other]
