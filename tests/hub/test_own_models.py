"The book's own models come with the package: read without a network, known to transformers, and as good as their card says."

import math
import os
import subprocess
import sys
from pathlib import Path

import annotated_nlp
import pytest
import torch
import transformers
from annotated_nlp import lab, tokenization
from annotated_nlp.bert import Bert, BertForMaskedLM, BertForSequenceClassification
from annotated_nlp.contextual import LSTMLanguageModel
from annotated_nlp.corpora.loaders import movie_reviews
from annotated_nlp.gpt import GPT
from annotated_nlp.hub.checkpoints import find_folder

NAME = "annotated-nlp/reviews-bert"
FOLDER = Path(annotated_nlp.__file__).parent / "hub" / "weights" / "reviews-bert"
MODELS = {
    NAME: (BertForMaskedLM, transformers.BertForMaskedLM),
    "annotated-nlp/reviews-gpt": (GPT, transformers.GPT2LMHeadModel),
}
LSTM = "annotated-nlp/reviews-lstm"
KINDS = {name: kind for name, (kind, _) in MODELS.items()} | {LSTM: LSTMLanguageModel}
each_model = pytest.mark.parametrize("name", KINDS)
TEXTS = ["A moving film, and very well acted.", "I want my [MASK] back!", "Überraschend gut."]


@each_model
def test_found_without_a_network(name):
    kind = KINDS[name]
    code = (
        f"from {kind.__module__} import {kind.__name__} as model; from annotated_nlp import tokenization;"
        f"print(model.from_pretrained({name!r}).config.d_model, tokenization.load({name!r}).get_vocab_size())"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert said.split() == ["224" if name == LSTM else "192", "8000"]


def test_a_folder_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_folder(NAME, []) == FOLDER
    (tmp_path / NAME).mkdir(parents=True)
    assert find_folder(NAME, []) == Path(NAME)


def test_an_unknown_name_names_those_there_are():
    with pytest.raises(FileNotFoundError, match=r"annotated-nlp/reviews-berta.*annotated-nlp/reviews-bert"):
        Bert.from_pretrained("annotated-nlp/reviews-berta")


@each_model
def test_at_most_eight_megabytes(name):
    assert sum(path.stat().st_size for path in find_folder(name, []).iterdir()) < 8e6


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_it_and_agrees(name):
    (ours, theirs), folder = MODELS[name], find_folder(name, [])
    ours, theirs = ours.from_pretrained(name), theirs.from_pretrained(folder).eval().float()
    tokenizer, mine = transformers.AutoTokenizer.from_pretrained(folder), tokenization.load(name)
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert mine.encode(text).ids == ids[0].tolist()
        with torch.no_grad():
            torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_fills_gaps_as_its_card_says():
    "On the test reviews' first rows, with every seventh piece hidden: near the share that the card names, far above counting."
    model, tokenizer = BertForMaskedLM.from_pretrained(NAME), tokenization.load(NAME)
    mask = tokenizer.token_to_id("[MASK]")
    rows = [tokenizer.encode(row.text).ids[:128] for row in movie_reviews(split="test")[:120]]
    right = asked = 0
    for row in rows:
        ids, hidden = torch.tensor([row]), torch.arange(len(row)) % 7 == 3
        with torch.no_grad():
            guesses = model(ids.masked_fill(hidden, mask))[0, hidden].argmax(-1)
        right, asked = right + int((guesses == ids[0, hidden]).sum()), asked + int(hidden.sum())
    [card] = [r for r in lab.results("reviews_bert") if "the book's BERT" in r["numbers"]["scores"]][:1]
    assert right / asked > card["numbers"]["scores"]["the book's BERT"] - 0.04
    assert right / asked > card["numbers"]["scores"]["counting, seeing what BERT sees"]


def test_a_new_head_on_it():
    model = BertForSequenceClassification.from_pretrained(NAME, fresh=["trunk.pooler", "classifier"], n_classes=3)
    assert model(torch.tensor([[2, 100, 3]])).shape == (1, 3)


def test_writes_as_its_card_says():
    "On the first test reviews, each alone and cut at 256 tokens: near the card's bits per byte, and below those of counting."
    model, tokenizer = GPT.from_pretrained("annotated-nlp/reviews-gpt"), tokenization.load("annotated-nlp/reviews-gpt")
    end, bits, size = tokenizer.token_to_id("<|endoftext|>"), 0.0, 0
    for row in movie_reviews(split="test")[:80]:
        ids = torch.tensor([[end, *tokenizer.encode(row.text).ids[:255]]])
        with torch.no_grad():
            bits += torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="sum").item() / math.log(2)
        size += len(tokenizer.decode(ids[0, 1:].tolist()).encode())
    card = lab.results("reviews_gpt")[0]["numbers"]["bits"]
    [counts] = [value for name, value in card.items() if name.startswith("counts")]
    assert bits / size < min(counts, card["the book's GPT"] + 0.1)


def test_remembers_as_its_card_says():
    "The first test reviews in one line, read by PyTorch's own layers: near the card's bits per byte, and below those of counting."
    model, tokenizer = LSTMLanguageModel.from_pretrained(LSTM), tokenization.load(LSTM)
    texts = [row.text for row in movie_reviews(split="test")[:80]]
    ids = torch.tensor([[model.config.eos_id, *(i for text in texts for i in [*tokenizer.encode(text).ids, model.config.eos_id])]])
    x = model.embedding(ids[:, :-1])
    with torch.no_grad():
        for layer in model.layers:
            x = layer.lstm(x)[0]
        logits = x @ model.embedding.weight.T + model.bias
        nats = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
    card = {name: by["one line"] for name, by in lab.results("reviews_lstm")[0]["numbers"]["bits"].items()}
    size = sum(len(text.encode()) + 1 for text in texts)
    assert nats / math.log(2) / size < min(card["counts, order 6"], card["the book's LSTM"] + 0.1)
