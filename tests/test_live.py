"Models in the browser: the file, the tokenizer and the numbers against PyTorch's, and the page as a reader handles it."

import json
from pathlib import Path

import jaxtyping
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from annotated_nlp import live
from annotated_nlp.bert import Bert, BertForMaskedLM
from annotated_nlp.gpt import GPT
from annotated_nlp.tokenization import load
from onnx import numpy_helper

NBS = Path(__file__).resolve().parent.parent / "nbs"
LIMIT = 4_000_000  # bytes that a page fetches on a click, the runtime aside
NAMES = list(live.BOOK)


def book(name):
    return live.BOOK[name].from_pretrained(f"annotated-nlp/{name}")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    "The site's files written anew, and the PyTorch models that they must compute."
    folder = tmp_path_factory.mktemp("models")
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)  # torch.export can't follow its checks
    made = {name: live.export(book(name), load(f"annotated-nlp/{name}"), folder / name) for name in NAMES}
    jaxtyping.config.update("jaxtyping_disable", before)
    return folder, made


# The file


@pytest.mark.parametrize("name", NAMES)
def test_the_file_computes_the_rounded_model(fresh, name):
    "At every position of a text, by another implementation; and not the model that wasn't rounded, which shows that this can fail."
    folder, made = fresh
    model, worst = made[name]
    assert 0 < worst < 1e-4
    session = onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
    ids = torch.tensor(load(f"annotated-nlp/{name}").encode("A film that nobody needs, and that I saw twice.").ids).int()
    at = torch.arange(len(ids)).int()
    (there,) = session.run(None, dict(ids=ids.numpy(), at=at.numpy()))
    with torch.no_grad():
        here, exact = (live.Asked(one.eval())(ids, at).numpy() for one in (model, book(name)))
    assert np.abs(there - here).max() < 1e-4 < 1e-2 < np.abs(there - exact).max()


@pytest.mark.parametrize("name", NAMES)
def test_the_site_has_these_files(fresh, name):
    "The same weights and the same tokenizer as one that is written today, small enough for a page."
    folder, _ = fresh
    new, old = (onnx.load(place / f"{name}.onnx").graph for place in (folder, NBS / "models"))
    weights = [{one.name: numpy_helper.to_array(one) for one in graph.initializer} for graph in (new, old)]
    assert weights[0].keys() == weights[1].keys()
    assert all(np.array_equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert sum(one.dtype == np.int8 and one.size or 0 for one in weights[1].values()) > 3_000_000
    assert json.loads((folder / f"{name}.json").read_text()) == json.loads((NBS / "models" / f"{name}.json").read_text())
    assert sum((NBS / "models" / f"{name}.{kind}").stat().st_size for kind in ("onnx", "json")) < LIMIT


def test_pieces_are_in_the_file_once(fresh):
    "Though the first layer and the last use them."
    folder, _ = fresh
    for name in NAMES:
        shapes = [tuple(one.dims) for one in onnx.load(folder / f"{name}.onnx").graph.initializer]
        assert sum(8000 in shape and 192 in shape for shape in shapes) == 1


def test_rounding_leaves_the_model_alone():
    model = book("reviews-gpt").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small, stored = live.rounded(model)
    assert model.training and not small.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    name = "stack.blocks.0.feed_forward.layer.up.weight"
    assert torch.equal(small.state_dict()[name], stored[name].codes * stored[name].scale)
    step = stored[name].scale
    assert ((small.state_dict()[name] - before[name]).abs() <= step / 2 * 1.001).all()


def test_other_models_are_refused(unchecked, tmp_path):
    with pytest.raises(ValueError, match="model is a Bert: give a GPT or a BertForMaskedLM"):
        live.export(Bert.from_pretrained("annotated-nlp/reviews-bert", pooler=False), load("annotated-nlp/reviews-bert"), tmp_path / "m")
    assert not list(tmp_path.iterdir()) and BertForMaskedLM is live.BOOK["reviews-bert"] and GPT is live.BOOK["reviews-gpt"]
