"The package's top: every model by its name, imported when it is asked for, and nothing before."

import importlib
import inspect
import pkgutil
import subprocess
import sys

import annotated_nlp
import pytest
import torch
from annotated_nlp.parts.model import Pretrained
from messages import says

MODULES = [m.name for m in pkgutil.walk_packages(annotated_nlp.__path__, "annotated_nlp.") if not m.ispkg and "._" not in m.name]


def test_import_alone_brings_no_torch():
    "Nothing but what Python has: neither torch nor numpy, nor a module of our own."
    code = ("import sys; before = set(sys.modules); import annotated_nlp; dir(annotated_nlp); "
            "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "['annotated_nlp']\n"


@pytest.mark.parametrize("name", annotated_nlp.__all__)
def test_every_name_is_what_its_module_defines(name):
    thing = getattr(annotated_nlp, name)
    assert getattr(importlib.import_module(thing.__module__), thing.__name__) is thing
    assert name == "load" or thing.__name__ == name


def test_every_model_is_there():
    "Each class that can be loaded and isn't the base of others, with its configuration."
    models = {thing for module in MODULES for thing in vars(importlib.import_module(module)).values()
              if inspect.isclass(thing) and issubclass(thing, Pretrained) and thing.__module__ == module}
    bases = {"Pretrained", "Encoder", "OnTrunk", "EncoderDecoder"}
    assert {model.__name__ for model in models} - bases <= set(annotated_nlp.__all__)


def test_what_a_reader_tries_first():
    assert {"GPT", "Bert", "T5", "load", "attention", "parts", "__version__"} <= set(dir(annotated_nlp))
    assert "annotated_nlp.load(" in annotated_nlp.__doc__
    assert annotated_nlp.decoding.greedy
    with pytest.raises(AttributeError, match="has no attribute 'GPT5'"):
        getattr(annotated_nlp, "GPT5")  # noqa: B009


@pytest.mark.parametrize("name, kind", [
    ("reviews-gpt", "GPT"), ("reviews-bert", "BertForMaskedLM"), ("reviews-lstm", "LSTMLanguageModel"),
    ("numbers-fr", "Transformer"), ("digits-vit", "ViT"),
])
def test_load_gives_the_class_that_the_file_names(name, kind):
    "The same weights as by the class itself, and the tokenizer that lies beside them."
    model, tokenizer = annotated_nlp.load(f"annotated-nlp/{name}")
    there = getattr(annotated_nlp, kind).from_pretrained(f"annotated-nlp/{name}").state_dict()
    assert type(model).__name__ == kind and all(torch.equal(value, there[key]) for key, value in model.state_dict().items())
    assert (tokenizer is None) == (kind == "ViT")


def test_a_class_that_nobody_has(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    with pytest.raises(ValueError, match=says("MambaForCausalLM", "from_pretrained of a class")):
        annotated_nlp.load(tmp_path)
