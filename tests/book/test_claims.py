"The table of claims: differences with their intervals, verdicts by rule, and rows computed from what is stored."

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import messages
import nbformat
import numpy as np
import pytest
import torch
from annotated_nlp import lab
from annotated_nlp.show.forest import Forest
from scipy.stats import bootstrap

ROOT = Path(__file__).resolve().parents[2]

# The bootstrap


def scores(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def half_width(found):
    return (found["high"] - found["low"]) / 2


def test_items_alone_agree_with_the_normal_approximation():
    first, second = scores(2000, seed=1) + 0.1, scores(2000, seed=2)
    second = 0.7 * first + 0.3 * second  # hard items are hard for both
    found = lab.difference(first, second, unit="nats")
    error = (first - second).std() / 2000**0.5
    assert found["effect"] == pytest.approx((first - second).mean().item())
    assert half_width(found) == pytest.approx(1.96 * error.item(), rel=0.04)
    assert lab.resampled(first, second).std() == pytest.approx(error.item(), rel=0.03)
    assert (found["n_test"], found["seeds"], found["unit"]) == (2000, 1, "nats")


def test_items_alone_agree_with_scipy():
    first, second = scores(300, seed=1).exp(), scores(300, seed=2)  # not symmetric
    theirs = bootstrap((first.numpy(), second.numpy()), lambda a, b, axis: a.mean(axis) - b.mean(axis), paired=True,
                       vectorized=True, method="percentile", n_resamples=20_000, rng=np.random.default_rng(0))
    ours = lab.difference(first, second, resamples=20_000)
    error = theirs.standard_error
    assert [ours["low"], ours["high"]] == pytest.approx([*theirs.confidence_interval], abs=0.05 * error)


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
@pytest.mark.parametrize("paired", [False, True])
def test_items_and_seeds_add_their_variances(n_seeds, paired):
    "Items: the variance of a mean over them, all seeds in. Seeds: the unbiased one, s - 1 in the denominator."
    items, n = scores(500, seed=3), 500
    first = items + 0.2 * scores(n_seeds, 1, seed=4) + 0.1 * scores(n_seeds, n, seed=5)
    second = 0.8 * items + 0.1 * scores(n_seeds, 1, seed=6)
    of_items = (first - second).mean(0).var(correction=0) / n
    if paired:
        of_seeds = (first - second).mean(1).var() / n_seeds
    else:
        of_seeds = (first.mean(1).var() + second.mean(1).var()) / n_seeds
    drawn = lab.resampled(first, second, paired=paired, resamples=20_000)
    assert drawn.var() == pytest.approx((of_items + of_seeds).item(), rel=0.05)
    assert drawn.mean().item() == pytest.approx((first - second).mean().item(), abs=0.05 * drawn.std().item())


def test_interval_covers_what_is_known():
    "Items, seeds and their interplay of known variance: the truth, 0, lies within in about 95 of 100 experiments."
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(100):
        draw = partial(torch.randn, generator=generator)
        items = draw(200)
        arms = [items + 0.3 * draw(200) + 0.02 * draw(10, 1) + 0.3 * draw(10, 200) for _ in range(2)]
        found = lab.difference(*arms, resamples=500)
        covered += found["low"] <= 0 <= found["high"]
    assert 89 <= covered <= 99


@pytest.mark.parametrize("n_seeds, share", [(2, 0.63), (3, 0.84), (5, 0.91)])
def test_few_seeds_cover_less(n_seeds, share):
    "What the laboratory's page says of the extreme in which chance lies in the seeds alone."
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    covered = 0
    for _ in range(300):
        found = lab.difference(*(draw(n_seeds, 1) + 0.05 * draw(n_seeds, 20) for _ in range(2)), resamples=300)
        covered += found["low"] <= 0 <= found["high"]
    assert covered / 300 == pytest.approx(share, abs=0.06)


def test_rows_that_no_seed_made():
    "A rule has items alone; only the other arm's seeds are drawn."
    first, second = scores(3, 400, seed=1), scores(400, seed=2)
    of_items = (first.mean(0) - second).var(correction=0) / 400
    of_seeds = first.mean(1).var() / 3
    assert lab.resampled(first, second, resamples=20_000).var() == pytest.approx((of_items + of_seeds).item(), rel=0.05)
    assert lab.difference(first, second)["seeds"] == 3


def test_score_of_several_numbers():
    "F1 from true positives, false positives and misses; as the mean where the score is one."
    parts = torch.randint(0, 4, (2, 3, 400, 3), generator=torch.Generator().manual_seed(0))

    def f1(means):
        right, wrong, missed = means.unbind(-1)
        return 2 * right / (2 * right + wrong + missed)

    found = lab.difference(*parts, score=f1)
    one, other = (sum(2 * a / (2 * a + b + c) for a, b, c in arm.sum(1).tolist()) / 3 for arm in parts)
    assert found["effect"] == pytest.approx(one - other) and found["low"] < found["effect"] < found["high"]
    assert (found["n_test"], found["seeds"]) == (400, 3)
    first, second = scores(2, 3, 50).unbind()
    assert lab.difference(first[..., None], second[..., None], score=lambda means: means[..., 0]) == lab.difference(first, second)


def test_same_seed_same_interval():
    first, second = scores(3, 100, seed=1), scores(3, 100, seed=2)
    found = lab.difference(first, second)
    assert lab.difference(first, second) == found != lab.difference(first, second, seed=1)
    assert lab.difference(first.tolist(), second.numpy()) == found
    assert all(type(found[key]) is float for key in ("effect", "low", "high"))


def test_items_stay_together():
    "Two arms that differ by the same on every item and every seed differ by that in every draw; bools are numbers."
    first = scores(3, 100)
    first = first - first.mean(1, keepdim=True)
    found = lab.difference(first, first - 0.5)
    assert [found["effect"], found["low"], found["high"]] == pytest.approx([0.5] * 3)
    assert lab.difference([True] * 20, [False] * 20)["low"] == 1


def test_memory_does_not_change_what_is_drawn():
    "Many items are drawn in several parts."
    first, second = scores(60_000, seed=1), scores(60_000, seed=2)
    drawn = lab.resampled(first, second, resamples=300)
    assert len(drawn) == 300 and drawn.std().item() == pytest.approx((first - second).std().item() / 60_000**0.5, rel=0.15)


def refused(first, second, **options):
    return lambda: lab.difference(first, second, **options)


test_bad_arms = messages.refused([
    (refused(scores(0), scores(0)), ["first", "(0,)"]),
    (refused(scores(3, 0), scores(3, 0)), ["first", "(3, 0)"]),
    (refused(torch.tensor(1.0), torch.tensor(1.0)), ["first", "(items)"]),
    (refused(scores(2, 3, 4), scores(2, 3, 4)), ["first", "(seeds, items)"]),
    (refused(scores(5), scores(5), score=len), ["first", "(seeds, items, parts)"]),
    (refused(scores(3, 8), scores(3, 9)), ["(8,)", "(9,)", "same items"]),
    (refused(scores(8, 2), scores(8, 3), score=len), ["(8, 2)", "(8, 3)"]),
    (refused(scores(3, 8), scores(2, 8)), ["(3, 8)", "(2, 8)", "seeds"]),
    (refused(scores(3, 8), scores(8), paired=True), ["(3, 8)", "(8,)", "seeds"]),
    (refused([0.5, float("nan")], [0.5, 1.0]), ["first", "nan", "(1,)"]),
    (refused([0.5, 1.0], [[0.5, float("inf")]]), ["second", "inf", "(0, 1)"]),
    (refused(scores(8), scores(8), resamples=0), ["resamples=0"]),
])


# The table

KEYS = ["number", "claim", "lecture", "page", "measure", "effect", "low", "high", "n_test", "seeds", "verdict", "unit", "note"]
NUMBERS = ["effect", "low", "high", "n_test", "seeds"]


@pytest.fixture
def keep(tmp_path, monkeypatch):
    "Results go to an empty folder; a call stores one that says something of a claim."
    monkeypatch.setattr(lab, "_folder", lambda: tmp_path)

    def store(number="18", name="demo", seconds=60.0, when="2030-01-01", **changes):
        entry = dict(effect=2.0, low=1.0, high=3.0, n_test=1000, seeds=3, unit="points") | changes
        record = lab.new_record(name, command="", settings={}, numbers=dict(claims={number: entry}), seconds=seconds)
        lab.store(record | dict(when=when))

    return store


def row(number):
    return lab.claims()[number - 1]


def test_every_claim_is_there_in_order():
    rows = lab.claims()
    assert [found["number"] for found in rows] == [*range(1, 43)]
    for found in rows:
        assert list(found) == KEYS
        assert re.fullmatch(r"00[0234]( 00[0234])*", found["lecture"]) and found["claim"] and found["measure"] and found["page"]
        known = [found[key] is not None for key in NUMBERS]
        assert all(known) or not any(known) and found["verdict"] == "open"
        assert bool(found["note"]) == (found["verdict"] == "open")


def test_pages_of_the_registry_are_there():
    missing = {claim["page"] for claim in lab._registry() if not (ROOT / "nbs" / f"{claim['page']}.ipynb").exists()}
    assert not missing


def test_rows_come_from_stored_results_alone(keep):
    "Without results every claim is open; another stored number is another row."
    assert {found["verdict"] for found in lab.claims()} == {"open"} and row(18)["note"] == "not yet measured"
    keep()
    found = row(18)
    assert [found[key] for key in NUMBERS] == [2.0, 1.0, 3.0, 1000, 3]
    assert (found["verdict"], found["page"], found["unit"]) == ("shown", "lab/demo", "points")
    keep(effect=-2.5, low=-3.0, high=-1.0, n_test=2000)
    assert [row(18)[key] for key in NUMBERS] == [-2.5, -3.0, -1.0, 2000, 3] and row(18)["verdict"] == "contrary"
    assert {found["verdict"] for found in lab.claims() if found["number"] != 18} == {"open"}


@pytest.mark.parametrize("low, high, verdict", [
    (0.1, 2, "shown"), (-2, -0.1, "contrary"), (-1, 1, "not shown"), (0, 1, "not shown"), (-1, 0, "not shown"), (0, 0, "not shown"),
])
def test_verdict(keep, low, high, verdict):
    assert lab.verdict(low, high) == verdict
    keep(low=low, high=high)
    assert row(18)["verdict"] == verdict


def test_an_interval_wider_than_the_papers_effect_decides_nothing(keep, monkeypatch):
    "It holds zero and the effect, or could: the numbers stay, the verdict is open. Four times as many items halve it."
    registry = [dict(claim, paper=dict(effect=2.0, source="a paper")) for claim in lab._registry()]
    monkeypatch.setattr(lab, "_registry", lambda: registry)
    keep(effect=0.5, low=-1.5, high=2.5)
    assert row(18)["verdict"] == "open" and row(18)["effect"] == 0.5
    assert row(18)["note"] == ("the interval is 4 points wide, the paper's effect 2 (a paper); "
                               "4 times as many items and seeds would tell it from none")
    for low, high, verdict in ((-1.0, 1.0, "not shown"), (0.1, 5.0, "shown"), (-5.0, -0.1, "contrary")):
        keep(effect=(low + high) / 2, low=low, high=high)
        assert (row(18)["verdict"], row(18)["note"]) == (verdict, "")


def test_what_is_too_small_decides_nothing(keep):
    keep(n_test=999, seeds=2)
    assert row(18)["verdict"] == "open" and row(18)["effect"] is None
    assert row(18)["note"] == "demo has 999 of 1,000 test items, 2 of 3 seeds"
    keep(seeds=2, seconds=float(lab.LONG_S))
    assert row(18)["verdict"] == "shown"
    keep(seeds=1, seconds=float(lab.LONG_S))
    assert row(18)["note"] == "demo has 1 of 2 seeds"
    keep("8", n_test=10, seeds=1)  # about time, not about items
    assert row(8)["verdict"] == "shown"


def test_nobody_chooses_among_results(keep):
    "More seeds, then more items, then the newer."
    keep(name="a", effect=1.1, low=1.0, n_test=5000)
    keep(name="b", effect=1.2, low=-1.0, n_test=1000, seeds=4)
    assert (row(18)["page"], row(18)["verdict"]) == ("lab/b", "not shown")
    keep(name="a", effect=1.1, n_test=5000, seeds=4)
    assert row(18)["page"] == "lab/a"
    keep(name="b", n_test=5000, seeds=4, when="2031-01-01")
    assert row(18)["page"] == "lab/b"
    keep(name="c", n_test=9, seeds=9)
    assert row(18)["page"] == "lab/b"


def test_an_entry_may_name_its_measure(keep):
    keep(measure="accuracy with 100 labels")
    assert row(18)["measure"] == "accuracy with 100 labels"


def test_pilots_are_stored_results():
    names = {run["name"] for run in lab.results()}
    for claim in lab._registry():
        assert set(claim["pilots"]) <= names
        found = row(claim["number"])
        assert found["verdict"] != "open" or all(f"pilot {name}: " in found["note"] or f"{name} has" in found["note"] for name in claim["pilots"])


@pytest.mark.parametrize("number, entry, words", [
    ("43", {}, ["claim='43'"]), ("18", dict(effect=1.0), ["claim 18", "low, high, n_test, seeds, unit"]),
    ("18", dict(effect=1.0, low=2.0, high=1.0, n_test=9, seeds=1, unit=""), ["low=2.0", "high=1.0"]),
    ("18", dict(effect=float("nan"), low=1.0, high=2.0, n_test=9, seeds=1, unit=""), ["effect=nan"]),
    ("18", dict(effect=1.0, low=1.0, high=2.0, n_test=0, seeds=1, unit=""), ["n_test=0"]),
])
def test_other_forms_are_refused_before_they_are_stored(keep, monkeypatch, number, entry, words):
    monkeypatch.delenv("LAB_RUN", raising=False)
    with pytest.raises(ValueError, match=messages.says(*words)):
        lab.Experiment("demo", full={}, quick={}).save(dict(claims={number: entry}))


def test_a_difference_is_what_a_claim_needs(keep, monkeypatch):
    monkeypatch.setenv("LAB_RUN", "full")
    found = lab.difference(scores(3, 1000) + 1, scores(3, 1000, seed=1), unit="nats")
    lab.Experiment("demo", full={}, quick={}).save(dict(claims={"11": found}))
    assert {key: row(11)[key] for key in found} == found and row(11)["verdict"] == "shown"


def test_the_command_prints_one_object_a_line():
    done = subprocess.run([sys.executable, "-m", "tools.claims"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == lab.claims()
    recipe = re.search(r"^claims:.*\n\t(.+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1]
    assert recipe == "@$(BIN)/python -m tools.claims"


# The drawing


def test_forest_draws_what_is_decided(keep):
    "A strip for each, zero in its middle, all within it; the open ones below, folded."
    keep()
    keep("20", name="other", effect=-1e-3, low=-2e-3, high=5e-4, unit="<bits>")
    forest = Forest(lab.claims(), pages=["lab/demo", "03_seq2seq"])
    text = forest._repr_html_()
    assert text.count("<svg") == 2 and text.count('aria-label="') == 2 and "<details>" in text and "40 open claims" in text
    assert "+2.0 points" in text and "(+1.0 to +3.0)" in text and "&lt;bits&gt;" in text and "<bits>" not in text
    assert '<a href="lab/demo.html">Pretrain' in text and "lab/other.html" not in text
    bars = [[float(x) for x in found] for found in re.findall(r'class="bar" x1="([\d.]+)" x2="([\d.]+)"', text)]
    assert bars == [[129.3, 188.0], [12.0, 122.0]]
    assert "\n\n" not in text and "\n " not in text  # Markdown would end the HTML there
    assert repr(forest).startswith("42 claims: 1 shown, 0 contrary, 1 not shown, 40 open\n1 One vector")
    keep("7", name="wide", effect=0.5, low=-2.0, high=3.0, unit="BLEU")
    text = Forest(lab.claims())._repr_html_()
    assert text.count("<svg") == 3 and "39 open claims" in text and "<em>the interval is 5 BLEU wide" in text


def test_forest_without_open_or_decided_rows(keep):
    assert "<svg" not in Forest(lab.claims())._repr_html_()
    keep()
    text = Forest([row(18)])._repr_html_()
    assert "<details>" not in text and "1 claims" not in text and text.startswith('<div class="forest">')


def test_the_results_page_shows_the_present_table():
    nb = nbformat.read(ROOT / "nbs" / "results.ipynb", as_version=4)
    shown = [output["data"]["text/plain"] for cell in nb.cells for output in cell.get("outputs", []) if 'class="forest"' in output.get("data", {}).get("text/html", "")]
    assert shown == [repr(Forest(lab.claims()))], "make chapters NAMES=results"
