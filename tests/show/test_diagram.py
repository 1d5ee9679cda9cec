"Drawings: things lie where they were put, say what the tensors say, touch nothing strange, and can be read on a phone."

import os
import struct
from pathlib import Path

import matplotlib as mpl
import nbformat
import numpy as np
import pytest
import torch
from annotated_nlp.show.diagram import ROLES, WIDEST, Diagram, size_of
from annotated_nlp.show.style import COLOURS
from matplotlib.colors import to_hex
from matplotlib.image import imread
from torch import nn

NBS = Path(__file__).resolve().parents[2] / "nbs"


@pytest.fixture(scope="module")
def page():
    "Every drawing of the page, made by running it, and the page's names."
    made, here, names = [], Path.cwd(), {}

    def noted(kind):
        init = kind.__init__

        def note(self):
            init(self)
            made.append(self)

        kind.__init__ = note

    os.chdir(NBS / "show")
    try:
        for cell in nbformat.read("diagram.ipynb", as_version=4).cells:
            if cell.cell_type == "code":
                before = names.get("Diagram")
                exec(cell.source, names)
                if names.get("Diagram") is not before:  # the page defines it
                    noted(names["Diagram"])
    finally:
        os.chdir(here)
    return made, names


def texts(d):
    return [text.get_text() for text, _ in d._texts]


def test_drawings_of_the_page_are_fit_to_print(page):
    made, names = page
    shown = [d for d in made if d is not names["tight"]]
    assert len(shown) >= 9 and names["tight"].overlaps()
    assert [d.overlaps() for d in shown] == [[]] * len(shown)
    assert min(d.smallest_text(390) for d in shown) >= 9
    assert max(d.size[0] for d in shown) <= WIDEST


def test_drawings_of_the_page_say_the_models_shapes(page):
    names = page[1]
    weights = sum(p.numel() for p in nn.GRU(16, 32).parameters())
    assert f"one cell at five steps, {weights:,} weights" in texts(names["rnn"])
    assert "outputs: b n d = 1 × 5 × 32" in texts(names["rnn"])
    width = names["model"].config.d_model
    assert f"b n d = 1 × {len(names['pieces'])} × {width}" in texts(names["bert"])
    assert f"token\n{names['tokenizer'].get_vocab_size()} × {width}" in texts(names["bert"])
    assert {"Q\n5 × 6", "Kᵀ\n6 × 5", "weights\n5 × 5"} <= set(texts(names["head"]))


@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 192)])
def test_sizes_are_the_tensors(shape):
    said = size_of(torch.zeros(shape), " ".join("bnd"[: len(shape)]))
    numbers = said.split("= ")[-1].split(" × ") if shape else []
    assert tuple(map(int, numbers)) == shape


def test_sizes_of_modules():
    assert size_of(nn.Linear(64, 64)) == "4,160 weights"


@pytest.mark.parametrize("where, axis, sign", [("right_of", 0, 1), ("left_of", 0, -1), ("above", 1, 1), ("below", 1, -1)])
def test_elements_lie_where_they_were_put(where, axis, sign):
    "At the distance asked for, centred on the neighbour, on both sides of it; a stack's sheets count for distance alone."
    d = Diagram()
    first = d.box("first", times=3)
    second = d.box("a second one", gap=17, **{where: first})
    a, b = (first, second) if sign > 0 else (second, first)
    assert b.outer.min[axis] - a.outer.max[axis] == pytest.approx(17)
    assert second.centre[1 - axis] == pytest.approx(first.centre[1 - axis])


def test_corner_and_group():
    d = Diagram()
    a = d.box("a")
    b = d.box("b", right_of=a)
    c = d.box("c", above=[a, b])
    e = d.box("e", right_of=b, above=b, gap=9)
    assert c.centre[0] == pytest.approx((a.core.x0 + b.core.x1) / 2)
    assert (e.core.x0 - b.core.x1, e.core.y0 - b.core.y1) == pytest.approx((9, 9))


def test_boxes_hold_their_labels():
    d = Diagram()
    d.box("a label that is a good deal longer than the others\nin two lines")
    d.node("tanh", below=d.tokens(["a", "considerably"], below=d._blocks[0]))
    assert d.overlaps() == []
    assert all(owner.core.x0 < d._bounds(text).x0 and d._bounds(text).x1 < owner.core.x1 for text, owner in d._texts)


@pytest.mark.parametrize("path", ["straight", "elbow", "curve"])
def test_arrows_end_at_the_sides_that_face_each_other(path):
    d = Diagram()
    low = d.box("low")
    high = d.box("high", above=low, right_of=low, gap=40)
    wide = d.box("wide", width=200, below=low)
    d.arrow(low.top, high.left, path=path)
    d.arrow(low, wide)
    (_, bent), (_, down) = d._lines
    assert tuple(bent.vertices[0]) == low.top[:2] and tuple(bent.vertices[-1]) == high.left[:2]
    assert down.vertices[0][0] == down.vertices[-1][0] == pytest.approx(low.centre[0])
    assert d.overlaps() == []


def test_residual_goes_round():
    d = Diagram()
    layers = [d.box("one")]
    layers.append(d.box("two, and wider", above=layers[0]))
    total = d.residual(layers, side="right")
    _, loop = d._lines[-1]
    assert loop.get_extents().x1 > layers[1].core.x1 and tuple(loop.vertices[-1]) == total.right[:2]
    assert d.overlaps() == []


def test_cells_are_indexed_like_the_tensor():
    d = Diagram()
    m = d.matrix(torch.arange(6.0).view(2, 3), cell=10)
    assert (m.core.width, m.core.height) == pytest.approx((30, 20))
    assert m[0, 2].centre == pytest.approx((m.core.x1 - 5, m.core.y1 - 5))
    assert m[1].centre == pytest.approx((m.centre[0], m.core.y0 + 5))
    assert m[:, 0].core.height == pytest.approx(20)
    row = d.tokens(["a", "bb", "ccc"], below=m)
    assert row.core.x0 == row[0].core.x0 < row[1].core.x0 and row[2].core.x1 == row.core.x1
    vector = d.matrix(torch.zeros(4), right_of=m)
    assert vector.core.height == 4 * vector.core.width


def test_larger_numbers_are_darker():
    d = Diagram()
    d.matrix(torch.tensor([[0.0, 1.0, 2.0]]), role="attention")
    light = [sum(patch.get_facecolor()[:3]) for patch in d._axes.patches if patch.get_fill()]
    assert light == sorted(light, reverse=True) and len(set(light)) == 3


def test_colours_are_those_of_the_book():
    assert set(ROLES.values()) <= set(COLOURS)
    d = Diagram()
    d.box("a", role="norm")
    assert to_hex(d._axes.patches[0].get_edgecolor()) == COLOURS[ROLES["norm"]]


def test_overlaps_are_found():
    d = Diagram()
    a = d.box("a")
    b = d.box("b", right_of=a, gap=60)
    c = d.box("c", right_of=b, gap=60)
    d.text("hit", right_of=a, gap=15)
    d.arrow(a, c)
    d.text("twice", right_of=a, gap=15)
    found = d.overlaps()
    assert ("hit", "arrow from a to c") in found and ("twice", "hit") in found and ("arrow from a to c", "b") in found
    cut = Diagram()
    cut.frame(cut.box("in"), pad=-10)
    assert cut.overlaps()


def test_a_wide_drawing_is_refused():
    d = Diagram()
    last = d.box("a")
    with pytest.raises(ValueError, match="points wide.*shorten labels"):
        for _ in range(20):
            last = d.box("another", right_of=last)


@pytest.mark.parametrize("call, message", [
    (lambda d, a: d.box("b"), "place is missing"),
    (lambda d, a: d.box("b", above=a, below=a), "not both"),
    (lambda d, a: d.box("b", role="red", above=a), "role='red' must be one of 'plain'"),
    (lambda d, a: d.arrow(a, a.left, path="wavy"), "path='wavy' must be one of"),
    (lambda d, a: d.tokens([], above=a), "words is empty"),
    (lambda d, a: d.tokens(["x"], masked=[1], above=a), r"masked has position \[1\] of 1"),
    (lambda d, a: d.matrix(torch.zeros(2, 2, 2), above=a), "2 × 2 × 2 must have one or two axes"),
    (lambda d, a: d.matrix(torch.zeros(2, 2), rows=["x"], above=a), "rows has 1 labels and values 2"),
    (lambda d, a: a[0], "a has no cells"),
    (lambda d, a: d.bracket([], "x"), "elements is empty"),
    (lambda d, a: size_of(torch.zeros(2, 3), "b n d"), "axes='b n d' must name 2 axes"),
    (lambda d, a: Diagram().size, "the drawing is empty"),
])
def test_errors_name_the_argument(unchecked, call, message):
    d = Diagram()
    with pytest.raises(ValueError, match=message):
        call(d, d.box("a"))


def picture():
    d = Diagram()
    a = d.box("a")
    d.matrix(torch.eye(3), "I", below=a)
    d.arrow(a, d.node("σ", right_of=a), "$h_1$")
    return d


def test_the_same_picture_each_time_and_under_any_style():
    data, shown = picture()._repr_png_()
    with mpl.rc_context({"text.usetex": True, "font.size": 30, "figure.constrained_layout.use": True, "lines.linewidth": 9}):
        assert picture()._repr_png_()[0] == data
    width, height = struct.unpack(">II", data[16:24])
    assert abs(width - 2 * shown["width"]) <= 2 and abs(height - 2 * shown["height"]) <= 2


def test_nothing_is_cut_off(tmp_path):
    "The outermost pixels are paper, those within the margin aren't."
    (tmp_path / "a.png").write_bytes(picture()._repr_png_()[0])
    paper = (imread(tmp_path / "a.png")[..., :3] == 1).all(-1)
    edge = np.ones_like(paper)
    edge[8:-8, 8:-8] = False
    assert paper[edge].all() and not paper.all()
