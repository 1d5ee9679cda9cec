"The laboratory's rules: a stored result belongs to the settings that made it, and no accident leaves half of one."

import json
import platform
from pathlib import Path

import pandas as pd
import pytest
import torch
from annotated_nlp import lab

ROOT = Path(__file__).resolve().parents[2]
STORED = sorted((ROOT / "annotated_nlp" / "results").glob("*.json"))
KEYS = {"name", "device", "hardware", "versions", "commit", "command", "when", "wall_s", "settings", "numbers"}
# Records that are no page's, and the commands that make them.
OTHERS = {"gpu": "make gpu", "bench": "make bench", "bench_growth": "make bench", "bench_switches": "make bench", "site": "make measures"}
FULL, QUICK = dict(steps=400, digits=(1, 9), lr=1e-3), dict(steps=2, digits=(1, 2), lr=1e-3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    "Results go to an empty folder."
    monkeypatch.setattr(lab, "_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def full(monkeypatch):
    monkeypatch.setenv("LAB_RUN", "full")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.delenv("LAB_RUN", raising=False)


def make(**changes):
    return lab.Experiment("demo", full=FULL | changes, quick=QUICK)


def test_settings_in_force(folder, monkeypatch):
    monkeypatch.setenv("LAB_RUN", "full")
    assert (make().settings.steps, make().settings.digits) == (400, (1, 9))
    for value in ("", "quick", "1"):
        monkeypatch.setenv("LAB_RUN", value)
        assert make().settings.steps == 2
    monkeypatch.delenv("LAB_RUN")
    assert make().settings.steps == 2


def test_both_settings_need_the_same_keys(folder):
    with pytest.raises(ValueError, match=r"demo: .*\['lr', 'seed'\]"):
        lab.Experiment("demo", full=dict(steps=1, lr=1), quick=dict(steps=1, seed=1))


def test_full_run_leaves_a_record(folder, full):
    record = make().save(dict(loss=0.5, curve=(3, 2, 1)))
    (stored,) = lab.results("demo")
    assert stored == record and set(stored) == KEYS
    assert stored["settings"] == dict(steps=400, digits=[1, 9], lr=1e-3)
    assert stored["numbers"] == dict(loss=0.5, curve=[3, 2, 1])
    assert [f.name for f in folder.iterdir()] == [f"demo.{stored['device']}.json"]


def test_quick_run_writes_nothing(folder, quick):
    assert make().save(dict(loss=0.5))["numbers"] == dict(loss=0.5)
    assert list(folder.iterdir()) == []


@pytest.fixture
def stored(folder, monkeypatch):
    "A result of a full run; then a quick run begins."
    monkeypatch.setenv("LAB_RUN", "full")
    make().save(dict(loss=0.5))
    monkeypatch.delenv("LAB_RUN")
    (file,) = folder.iterdir()
    return file


def test_unchanged_settings_are_not_stale(stored):
    assert make().settings.steps == 2  # a tuple in the settings is a list in the file, and equal all the same


@pytest.mark.parametrize("changes, named", [
    (dict(steps=800), "steps was 400, is 800"),
    (dict(digits=(1, 8)), r"digits was \[1, 9\], is \[1, 8\]"),
])
def test_stale_result_is_refused(stored, changes, named):
    with pytest.raises(lab.StaleResult, match=named) as error:
        make(**changes)
    message = str(error.value)
    assert stored.name in message and "make lab-run NAME=demo" in message and "lr" not in message


def test_new_and_removed_settings_are_stale(stored):
    with pytest.raises(lab.StaleResult, match="seed was absent, is 1"):
        lab.Experiment("demo", full=FULL | dict(seed=1), quick=QUICK | dict(seed=1))
    with pytest.raises(lab.StaleResult, match="lr was 0.001, is absent"):
        lab.Experiment("demo", full=dict(steps=400, digits=(1, 9)), quick=dict(steps=2, digits=(1, 2)))


def test_staleness_is_one_experiment_s_own(stored):
    lab.Experiment("dem", full=dict(other=1), quick=dict(other=1))
    lab.Experiment("demo2", full=dict(other=1), quick=dict(other=1))


def test_full_run_replaces_a_stale_result(stored, full):
    make(steps=800).save(dict(loss=0.1))
    (result,) = lab.results("demo")
    assert (result["settings"]["steps"], result["numbers"]) == (800, dict(loss=0.1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object()])
def test_only_json_values_are_stored(stored, full, bad):
    before = stored.read_bytes()
    with pytest.raises((ValueError, TypeError)):
        make(steps=800).save(dict(loss=bad))
    assert stored.read_bytes() == before


@pytest.mark.parametrize("dies_in", ["write_text", "replace"])
def test_killed_write_leaves_the_old_result(stored, full, monkeypatch, dies_in):
    def half(self, text, **kwargs):
        with open(self, "w", encoding="utf-8") as file:
            file.write(text[:20])
        raise KeyboardInterrupt

    def killed(self, target):
        raise KeyboardInterrupt

    before = stored.read_bytes()
    monkeypatch.setattr(Path, dies_in, half if dies_in == "write_text" else killed)
    with pytest.raises(KeyboardInterrupt):
        make(steps=800).save(dict(loss=0.1))
    assert stored.read_bytes() == before
    assert [r["numbers"] for r in lab.results("demo")] == [dict(loss=0.5)]


def test_results_of_two_devices_stand_side_by_side(stored):
    record = json.loads(stored.read_text(encoding="utf-8"))
    (stored.parent / "demo.zzz.json").write_text(json.dumps(record | dict(device="zzz")), encoding="utf-8")
    assert [r["device"] for r in lab.results("demo")] == [record["device"], "zzz"]


def test_unknown_result_lists_the_known(folder, stored):
    with pytest.raises(FileNotFoundError, match=r"of 'dem'; results exist for: demo\. Run `make lab-run NAME=dem`"):
        lab.results("dem")
    stored.unlink()
    with pytest.raises(FileNotFoundError, match="none yet"):
        lab.results("demo")


def test_machine_names_hardware_and_versions():
    import torch

    assert lab.device() == ("cuda" if torch.cuda.is_available() else "cpu")
    line = lab.machine()
    assert "\n" not in line and torch.__version__ in line and f"Python {platform.python_version()}" in line


# What is stored in this repository


def test_every_experiment_has_a_result_and_every_result_its_experiment():
    notebooks = {f.stem for f in (ROOT / "nbs" / "lab").glob("[!.]*.ipynb")} - {"index"}
    assert notebooks and {f.name.split(".")[0] for f in STORED} - OTHERS.keys() == notebooks


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.name)
def test_stored_result_can_be_run_again(file):
    "It says on what, by which command, with which settings and from which committed source."
    record = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert set(record) == KEYS
    assert file.name == f"{record['name']}.{record['device']}.json"
    assert record["command"] == OTHERS.get(record["name"], f"make lab-run NAME={record['name']}")
    assert all(record[key] for key in ("hardware", "settings", "numbers", "when")) and record["wall_s"] > 0
    assert {"python", *lab.PACKAGES} <= set(record["versions"])
    assert len(record["commit"].removesuffix("+changes")) == 40


def test_rounded_reaches_every_number():
    value = {"a": (0.123456, 3, [1e-9, "x", None]), "b": {"c": -0.98765}}
    assert lab.rounded(value) == {"a": [0.1235, 3, [0.0, "x", None]], "b": {"c": -0.9877}}
    assert lab.rounded(2 / 3, 1) == 0.7


@pytest.mark.parametrize("values, options, text", [
    ([1, 2, 4], {}, "2.3 (1.0 to 4.0)"), ([0.501, 0.5014], dict(times=100), "50.1"), ([3], dict(digits=2), "3.00"),
    ([0.1, 0.2], dict(digits=3), "0.150 (0.100 to 0.200)"),
])
def test_spread_is_mean_and_range(values, options, text):
    assert lab.spread(pd.Series(values), **options) == lab.spread(torch.tensor(values).double(), **options) == text


def doubled(n, fail_at=None):
    if n == fail_at:
        raise RuntimeError(f"killed at {n}")
    return {"twice": 2 * n}


def test_a_full_run_keeps_its_folder_where_it_is_told(full, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("ANNOTATED_NLP_RUNS", str(tmp_path / "runs"))
    assert make().folder == tmp_path / "runs" / "demo" and make().folder.is_dir()


def test_a_quick_run_leaves_no_folder(quick, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("ANNOTATED_NLP_RUNS", str(tmp_path / "runs"))
    experiment = make()
    scratch = experiment.folder
    assert scratch.is_dir() and experiment.folder == scratch
    del experiment
    assert not scratch.exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_come_back_in_their_order(quick, folder, workers):
    def job(n):  # as one of a notebook: other processes get its code
        return {"twice": 2 * n}

    assert make().each(job, [dict(n=n) for n in (3, 1, 2)], workers) == [{"twice": n} for n in (6, 2, 4)]


def test_a_setting_with_a_slash_is_no_folder(quick, folder):
    def job(name):
        return name

    assert make().each(job, [dict(name="80/10/10")]) == ["80/10/10"]


def test_a_killed_run_repeats_no_job(full, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("ANNOTATED_NLP_RUNS", str(tmp_path / "runs"))
    calls = []

    def job(n):
        calls.append(n)
        return doubled(n, fail_at=2 if calls.count(2) == 1 else None)

    with pytest.raises(RuntimeError, match="killed at 2"):
        make().each(job, [dict(n=n) for n in (1, 2, 3)])
    assert make().each(job, [dict(n=n) for n in (1, 2, 3)]) == [{"twice": n} for n in (2, 4, 6)]
    assert calls.count(1) == 1 and calls.count(2) == 2
    assert not list((tmp_path / "runs").rglob("*.part"))


def test_a_record_counts_the_seconds_of_jobs_found_done_once(full, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("ANNOTATED_NLP_RUNS", str(tmp_path / "runs"))

    def job(n):
        return n

    for _ in range(2):  # the second begins with the first one's jobs done
        experiment = make()
        experiment.each(job, [dict(n=1)])
        for file in experiment.folder.glob("job/*.json"):
            kept = json.loads(file.read_text())
            file.write_text(json.dumps(kept | dict(seconds=5000.0)))
        experiment.each(job, [dict(n=1), dict(n=2)])
    assert 10_000 <= experiment.save({})["wall_s"] < 10_100
    assert make().save({})["wall_s"] < 100
