"The book's own models come with the package: read without a network, known to transformers, and as good as their card says."

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
from annotated_nlp.checkpoints import find_folder

NAME = "annotated-nlp/reviews-bert"
FOLDER = Path(annotated_nlp.__file__).parent / "models" / "reviews-bert"
TEXTS = ["A moving film, and very well acted.", "I want my [MASK] back!", "Überraschend gut."]


def test_found_without_a_network():
    code = (
        "from annotated_nlp import bert, tokenization;"
        f"print(bert.BertForMaskedLM.from_pretrained({NAME!r}).config.d_model, tokenization.load({NAME!r}).get_vocab_size())"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    assert said.split() == ["192", "8000"]


def test_a_folder_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_folder(NAME, []) == FOLDER
    (tmp_path / NAME).mkdir(parents=True)
    assert find_folder(NAME, []) == Path(NAME)


def test_an_unknown_name_names_those_there_are():
    with pytest.raises(FileNotFoundError, match=r"annotated-nlp/reviews-berta.*annotated-nlp/reviews-bert"):
        Bert.from_pretrained("annotated-nlp/reviews-berta")


def test_at_most_eight_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8e6


def test_transformers_reads_it_and_agrees():
    ours, theirs = BertForMaskedLM.from_pretrained(NAME), transformers.BertForMaskedLM.from_pretrained(FOLDER).eval().float()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    mine = tokenization.load(NAME)
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert mine.encode(text).ids == ids[0].tolist()
        with torch.no_grad():
            torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_fills_gaps_as_its_card_says():
    "On the test reviews' first rows, with every seventh piece hidden: near the share that the card names, far above counting."
    from annotated_nlp.data import movie_reviews

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
